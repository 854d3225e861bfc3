"""The target behind an OpenAI-compatible server (vLLM, llama-server, `edgespec serve`): it writes responses, and where the server
sends log-probabilities under token ids, it gives distributions.

Prompts are the target's own chat template, rendered here: as token ids, or as text where the server takes no ids (a BOS
that the server adds by itself is then left out). Knows no shards and no losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.core.errors import InputError, OneProcessError
from edgespec.core.files import read_json
from edgespec.core.shapes import ModelShape
from edgespec.core.texts import unwritable
from edgespec.recipe.schema import GenerateOptions, InferenceOptions
from edgespec_recipes.data.prompts import lookalikes_of, plain_ids, render
from edgespec_recipes.data.token_rows import documents_of
from edgespec_recipes.generating.http_json import JsonServer, Refusal
from edgespec_recipes.generating.response_shards import Answers, Request, Writer, Written
from edgespec_recipes.models.loading import stop_ids_of
from edgespec_recipes.parallel.precision import Precision
from edgespec_recipes.stored.top_k import LEAST, record_type

PROBE = "The café costs 12.50 € — naïve, isn't it?\n\tdef f(x): return x ** 2"
SHORT = "Hello"
PROBED_TOKENS = 24  # more of the test text: tokens from everywhere in the vocabulary, its end included
COMPLETIONS = "/v1/completions"
ENDS = ("stop", "length")
TOKEN_ID = "token_id:"
UNFIT = frozenset({500})  # what llama-cpp-python's server answers to a prompt that is no text
ELSE = (
    "use a server that sends them under token ids (vLLM, edgespec serve), or --inference.source file or torch for the whole "
    "build, or learn the written tokens: --distill.labels hard --distill.target-side live"
)
"""What to do where distributions are wanted of a server that has none to give."""
UNCLEAR = 2  # further tries for an answer that ends without a reason
LOWEST = -1e4  # log-probability that stands for any below it
ROUNDED = 1e-2  # the most that rounding makes of a log-probability of 0


def _told(answer: dict[str, Any], name: str) -> int | None:
    """A number of an answer's usage; None where it has none."""
    usage = answer.get("usage")
    number = usage.get(name) if isinstance(usage, dict) else None
    return number if type(number) is int else None


def probe_text(tokenizer: Any) -> str:
    """A text that two tokenizers split alike only where they are the same, or one goes on where the other ends."""
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer)) if number not in special]
    chosen = [ids[place] for place in np.linspace(0, len(ids) - 1, PROBED_TOKENS).astype(int)]
    words = [tokenizer.decode([number]).strip() for number in chosen]
    return " ".join([PROBE, *(word for word in words if word.isprintable() and "\ufffd" not in word)])


class ServerTarget:
    """One model of a server, held against the target's folder (config.json and tokenizer; no weights are read).

    Raises InputError: the server cannot be reached, has no such model, or splits text into other tokens than the target.
    """

    def __init__(self, how: InferenceOptions, target_folder: Path, tokenizer: Any) -> None:
        self.how, self.folder, self.tokenizer = how, target_folder, tokenizer
        self.server = JsonServer(how.url, how.timeout, how.retries)
        shape = ModelShape.from_config(read_json(target_folder / "config.json"))
        self.vocab_size = shape.vocab_size
        self.model, self.context_length = self._model(shape.context_length)
        self.where = f"{self.model} at {self.server.url}"
        self.precision = Precision(self.model, f"the target is {self.where}")
        self.probe = probe_text(tokenizer)
        self.adds_bos = self._check_vocabulary()
        self.sends_ids = self._takes_ids()

    def _model(self, context: int) -> tuple[str, int]:
        """(its name, tokens of its context)."""
        listed = self._asked("/v1/models").get("data")
        models = {
            str(model["id"]): model
            for model in (listed if isinstance(listed, list) else [])
            if isinstance(model, dict) and "id" in model
        }
        name = self.how.model or (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            raise InputError(
                f"inference.model is {self.how.model!r} and {self.server.url} has {', '.join(models) or 'no models'}; "
                "name one of these with --inference.model"
            )
        longest = models[name].get("max_model_len")
        return name, min(context, longest) if type(longest) is int and longest > 0 else context

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            return self.server.ask(path, body)
        except Refusal as error:
            raise OneProcessError(f"{self.server.url}{path} refuses the request: {error}") from error

    def _check_vocabulary(self) -> bool:
        """Whether the server puts a BOS before a text. Raises InputError where its tokens are not the target's.

        A server that shows its tokens is held against all of them, another against the number it counts in a text.
        """
        ours = self.split(self.probe)
        theirs, bos = self._their_tokens(), self.tokenizer.bos_token_id
        if theirs is not None and theirs not in (ours, [bos, *ours]):
            raise InputError(
                f"{self.where} splits a test text into {theirs[:8]} ..., the target in {self.folder} into {ours[:8]} ...; "
                "serve the same model"
            )
        added = self._counted(SHORT) - len(self.split(SHORT))
        counted = self._counted(self.probe)
        if added not in (0, 1) or counted != len(ours) + added:
            raise InputError(
                f"{self.where} counts {counted} tokens in a test text, the target in {self.folder} {len(ours)}; serve that model"
            )
        return added == 1

    def split(self, text: str) -> list[int]:
        return plain_ids(self.tokenizer, text)

    def _counted(self, text: str) -> int:
        """Tokens that the server counts in a text. Raises InputError where it does not say."""
        body = {"prompt": text, "max_tokens": 1, "temperature": 0.0, "model": self.model}
        counted = _told(self._asked(COMPLETIONS, body), "prompt_tokens")
        if counted is None:
            raise InputError(
                f"{self.where} sends no usage.prompt_tokens, which its vocabulary is checked with; is it an OpenAI server?"
            )
        return counted

    def _their_tokens(self) -> list[int] | None:
        """The test text's tokens from vLLM's, llama-server's or llama-cpp-python's endpoint; None where there is none."""
        both = {"model": self.model, "prompt": self.probe, "content": self.probe, "add_special_tokens": False}
        for path, body in (("/tokenize", both), ("/extras/tokenize", {"input": self.probe})):
            try:
                found = self.server.ask(path, body).get("tokens")
            except Refusal:
                continue
            if isinstance(found, list) and all(type(token) is int for token in found):
                return found
        return None

    def _takes_ids(self) -> bool:
        if self.how.prompts == "text":
            return False
        ids = self.split(SHORT)
        probe = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        try:
            answer = self.server.ask(COMPLETIONS, probe, once=UNFIT)
            counted = _told(answer, "prompt_tokens")
            if counted in (None, len(ids)):
                return True
            words = f"it counts {counted} tokens in a prompt of {len(ids)}"
        except Refusal as error:
            words = str(error)
        if self.how.prompts == "ids":
            raise InputError(
                f"inference.prompts is 'ids' and {self.server.url} does not take token ids: {words}; give text or auto"
            )
        return False

    def choice(self, body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """(the only choice, how many tokens the server counts in it) of a completion that came to its end.

        Raises InputError for one that did not.
        """
        asked = {"model": self.model, "return_token_ids": True, **body}
        seen: Any = None
        for _ in range(1 + UNCLEAR):
            answer = self._asked(COMPLETIONS, asked)
            choices = answer.get("choices")
            if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
                seen = choices[0].get("finish_reason")
                if seen in ENDS:
                    return choices[0], _told(answer, "completion_tokens")
        raise OneProcessError(
            f"{self.where} breaks its answers off (finish_reason {seen!r}; stop or length is wanted); look at "
            "the server's log and run the same command again: whole shards are kept"
        )

    @contextmanager
    def at_once(self) -> Iterator[Executor]:
        """For several requests at once. After an error none is begun or tried again: the wait for those under way has an end."""
        with ThreadPoolExecutor(self.how.parallel) as pool:
            try:
                yield pool
            except BaseException:
                self.server.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def records(self, rows: Any, part: Sequence[int], top_k: int) -> Iterator[np.ndarray]:
        """See target_store.Distributions. Raises InputError where the server sends too few log-probabilities, none under ids."""
        with self.at_once() as pool:
            for number in part:
                row = rows[number]
                found = pool.map(
                    lambda places, row=row: self._document(row, places, top_k), documents_of(row)
                )
                yield np.concatenate([*found, np.empty(0, record_type(top_k, self.vocab_size))])

    def check_distributions(self, top_k: int) -> None:
        """Ask for the `top_k` most probable tokens of a short text. Raises InputError where the server does not give them."""
        ids = np.array(self.split(PROBE)[:PROBED_TOKENS])
        self._document({"input_ids": ids, "compared": np.ones(len(ids), bool)}, np.arange(len(ids)), top_k)

    def _document(self, row: dict[str, np.ndarray], places: np.ndarray, top_k: int) -> np.ndarray:
        """Records at the compared positions of one conversation: the echo scores its tokens, one token more the last place."""
        if not self.sends_ids:
            raise InputError(
                f"{self.where} takes prompts only as text, so its log-probabilities cannot be matched to token ids; {ELSE}"
            )
        wanted = np.flatnonzero(row["compared"][places])
        records = np.empty(len(wanted), record_type(top_k, self.vocab_size))
        if not len(wanted):
            return records
        ids = row["input_ids"][places][: wanted[-1] + 1].tolist()
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": top_k}
        choice, _ = self.choice({**body, "return_tokens_as_token_ids": True})
        scores = choice.get("logprobs")
        top = scores.get("top_logprobs") if isinstance(scores, dict) else None
        if not isinstance(top, list) or len(top) < len(ids) + 1:
            raise OneProcessError(f"{self.where} sends no log-probabilities of a prompt's tokens; {ELSE}")
        for record, place in zip(records, wanted, strict=True):
            tokens, log_p = self._most_probable(top[place + 1], top_k)
            record["ids"], record["log_p"] = tokens, log_p
            rest = 1.0 - math.fsum(math.exp(value) for value in log_p)
            record["log_rest"] = max(LEAST, math.log(rest)) if rest > 0 else LEAST
        return records

    def _most_probable(self, entry: Any, top_k: int) -> tuple[list[int], list[float]]:
        pairs: list[tuple[float, int]] = []
        for name, value in (entry if isinstance(entry, dict) else {}).items():
            number = name.removeprefix(TOKEN_ID)
            known = number.isdecimal() and len(number) < 9 and int(number) < self.vocab_size
            if number == name or not known:
                raise OneProcessError(
                    f"{self.where} names a token {name[:40]!r} where {TOKEN_ID}NUMBER is wanted; use a server that "
                    "knows return_tokens_as_token_ids (vLLM, edgespec serve)"
                )
            if not isinstance(value, int | float) or not value <= ROUNDED:  # NaN is neither
                raise OneProcessError(
                    f"{self.where} sends the log-probability {str(value)[:40]!r} of a token; a number of at most 0 is wanted"
                )
            pairs.append((min(0.0, max(LOWEST, value)), int(number)))
        if len(pairs) < top_k:
            raise OneProcessError(
                f"{self.where} sends {len(pairs)} log-probabilities for a token and {top_k} are to be stored; "
                f"start it with more (vLLM: --max-logprobs {top_k}) or give --distill.stored-top-k {max(1, len(pairs))}"
            )
        best = sorted(pairs, reverse=True)[:top_k]
        return [token for _, token in best], [value for value, _ in best]


class ServerWriter(ServerTarget, Writer):
    """Several requests are under way at once; each carries a seed of its own."""

    def __init__(
        self, how: InferenceOptions, target_folder: Path, tokenizer: Any, options: GenerateOptions, seed: int
    ) -> None:
        super().__init__(how, target_folder, tokenizer)
        self.options, self.seed, self.stops = options, seed, stop_ids_of(target_folder, tokenizer)

    def check(self, requests: list[Request]) -> None:
        if self.sends_ids:
            return
        for request in requests:
            if spelt := lookalikes_of(self.tokenizer).hide(request.messages)[1]:
                raise InputError(
                    f"{self.where} takes prompts as text, and there {', '.join(spelt.values())!r} of the instruction "
                    f"{request.messages[-1]['content'][:60]!r} would become a special token; leave that instruction out, or "
                    "use a server that takes token ids (inference.prompts ids)"
                )

    def answers(self, number: int, requests: list[Request]) -> Answers:
        with self.at_once() as pool:
            for request, answer in zip(requests, pool.map(self._answer, requests), strict=True):
                yield Written(request.id, answer, {})

    def _answer(self, request: Request) -> list[int]:
        choice, counted = self.choice(
            {
                "prompt": request.prompt_ids if self.sends_ids else self._text(request),
                "max_tokens": self.options.max_new_tokens,
                "temperature": request.temperature,
                "top_p": self.options.top_p,
                **({"min_p": self.options.min_p} if self.options.min_p else {}),  # no field of OpenAI's
                "seed": (self.seed * 1_000_003 + request.id) % 2**31,
            }
        )
        ids = self._ids(choice)
        if choice["finish_reason"] == "stop":
            end = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id in self.stops else self.stops[0]
            return ids if ids and ids[-1] in self.stops else [*ids, end]
        written = len(ids) if counted is None else counted
        if not ids or written < self.options.max_new_tokens:
            raise OneProcessError(
                f"{self.where} cut an answer off after {written} of "
                f"{self.options.max_new_tokens} tokens; start it with a longer context, or lower generate.max_new_tokens"
            )
        return ids

    def _text(self, request: Request) -> str:
        """The prompt in words, without the BOS that the server adds itself."""
        tokenizer = self.tokenizer
        if request.messages:
            text = render(tokenizer, request.messages)
        else:  # texts of the target's own go on from tokens
            text = tokenizer.decode(request.prompt_ids, clean_up_tokenization_spaces=False)
        return text.removeprefix(tokenizer.bos_token or "") if self.adds_bos else text

    def _ids(self, choice: dict[str, Any]) -> list[int]:
        """The answer's tokens as the server sent them, else of its text."""
        given = choice.get("token_ids")
        if isinstance(given, list):
            for token in given:
                if type(token) is not int or not 0 <= token < self.vocab_size:
                    raise OneProcessError(
                        f"{self.where} sends the token {str(token)[:40]!r}; the target has ids "
                        f"from 0 to {self.vocab_size - 1}: serve the same model"
                    )
            return given
        text = choice.get("text")
        if not isinstance(text, str) or unwritable(text):
            raise OneProcessError(
                f"{self.server.url}{COMPLETIONS} sends a choice without a text; is it such a server?"
            )
        return self.split(text)
