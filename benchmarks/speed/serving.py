"""What `edgespec serve` adds to decoding: to a request, to the token rate, and whether it holds under many requests.

    python -m benchmarks.speed.serving BUNDLE [--requests 200] [--at-once 8] [--rounds 3] [--json FILE]

The server runs in a process of its own and is asked over one kept connection. Three parts:

- A request: replies of one token, asked of the server and then made in this process (not in turns: an engine's threads wait
  busily after a pass, and would take the other's cores). Of both, the seconds that the loop took are left out. The difference is
  what the server adds: HTTP, reading the request, the queue, and this client. Bar: 2 ms.
- The token rate: greedy replies of a fixed draft length, streamed by the server and decoded in this process, in turns. Each is
  timed from its first piece to its last, and both must be the same text. Bar: 3 % less.
- Many requests: `--rounds` times `--requests`, `--at-once` at a time, half of them streamed. None may fail or take longer than
  a minute, and each must be what it was when asked alone; in fast mode a reply can change at a near tie, and is only counted.
  The server's resident memory is read after each tenth; its growth is a least-squares line over the second half.

Other programs disturb all of it: run it on a quiet machine. Exit code 1 where a bar is broken.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from edgespec_runtime.chat.replies import pieces
from edgespec_runtime.decoding.options import DecodingOptions
from edgespec_runtime.decoding.schedule import Fixed
from edgespec_runtime.engines.exactness import EXACT
from edgespec_runtime.pair.bundle import LoadOptions, Pair, open_pair

from benchmarks.common import command_line
from benchmarks.speed.endurance import MIB, resident, slope
from edgespec.core.files import write_json
from edgespec.core.metrics import RawCounts, median, quantile
from edgespec.core.progress import progress
from edgespec.core.table import table

BAR_MS, BAR_SHARE = 2.0, 0.03
BAR_BYTES = 4096.0  # of growth a request: a message, its ids and its reply that stay are more
DRAFT_LENGTH = 3
LONG = 160  # tokens of a timed reply, if the context has room and the model does not end it
SHORT = 24
SECONDS = 60.0
Json = dict[str, Any]


@contextmanager
def served(bundle: Path, flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(address, process id) of `edgespec serve` on a free port."""
    command = [sys.executable, "-m", "edgespec", "serve", str(bundle), "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serving"):
                raise SystemExit("the server did not start")
            yield line.split(" at ")[1].split("/v1")[0], process.pid
        finally:
            process.terminate()


class Client:
    """One kept connection."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)

    def close(self) -> None:
        self._connection.close()

    def _send(self, body: Json) -> http.client.HTTPResponse:
        data = json.dumps(body)
        self._connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
        return answer

    def whole(self, body: Json) -> Json:
        return dict(json.loads(self._send(body).read()))

    def streamed(self, body: Json) -> tuple[str, list[tuple[float, int]]]:
        """(text, (seconds, tokens so far) of every piece)."""
        answer = self._send({**body, "stream": True})
        text, tokens, times = "", 0, []
        for line in answer:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"]["content"]
                if mark := choice.get("speculation"):
                    tokens += mark["tokens"]
                    times.append((perf_counter(), tokens))
        answer.read()
        return text, times


def local(
    pair: Pair, prompt: Sequence[int], tokens: int, counts: RawCounts | None = None
) -> tuple[str, list[tuple[float, int]]]:
    """As `Client.streamed`, decoded here."""
    options = DecodingOptions(max_new_tokens=tokens, draft_length=DRAFT_LENGTH)
    text, count, times = "", 0, []
    for piece in pieces(pair, prompt, options, counts or RawCounts(), Fixed(DRAFT_LENGTH)):
        text += piece.text
        count += len(piece.tokens)
        times.append((perf_counter(), count))
    return text, times


def rate(times: Sequence[tuple[float, int]]) -> float:
    """Tokens a second from the first piece to the last."""
    return (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])


def body_of(messages: Any, tokens: int) -> Json:
    return {"messages": messages, "temperature": 0, "max_tokens": tokens, "draft_length": DRAFT_LENGTH}


def words(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])


def a_request(
    client: Client, pair: Pair, chats: Sequence[Any], repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of replies of one token beside the loop's own: (served, made here)."""
    served, here = [], []
    turns = [chats[number % len(chats)] for number in range(repeats)]
    for chat in turns:
        start = perf_counter()
        answer = client.whole(body_of(chat, 1))
        seconds = perf_counter() - start
        served.append(1e3 * (seconds - sum(answer["usage"]["speculation"]["seconds"].values())))
    for chat in turns:
        start, counts = perf_counter(), RawCounts()
        local(pair, pair.tokenizer.encode_chat(chat), 1, counts)
        here.append(1e3 * (perf_counter() - start - counts.prefill_seconds - counts.total_seconds))
    return served, here


def token_rates(
    url: str, pair: Pair, chats: Sequence[Any], rounds: int
) -> tuple[list[float], list[float], int]:
    """(rates served, rates here, texts that differ), the two in turns, each first in every other turn."""
    served_rates, local_rates, differing = [], [], 0
    for number in range(rounds):
        chat = chats[number % len(chats)]
        prompt = pair.tokenizer.encode_chat(chat)
        room = pair.target.engine.context_length - len(prompt)
        tokens = min(LONG, room)
        first = local(pair, prompt, tokens) if number % 2 else None
        with closing(Client(url)) as client:
            text, times = client.streamed(body_of(chat, tokens))
        own_text, own_times = first or local(pair, prompt, tokens)
        differing += text != own_text
        if min(times[-1][1], own_times[-1][1]) > SHORT:  # a reply of a few tokens times nothing
            served_rates.append(rate(times))
            local_rates.append(rate(own_times))
    return served_rates, local_rates, differing


def many(url: str, process: int, chats: Sequence[Any], requests: int, at_once: int, rounds: int) -> Json:
    """Requests at once: how many failed or differed, the times, and the memory."""
    with closing(Client(url)) as client:
        truth = [words(client.whole(body_of(chat, SHORT))) for chat in chats]
    seconds: list[float] = []
    failed: list[str] = []
    differing, memory, asked = 0, [resident(process)], [0]

    def ask(number: int) -> bool:
        place = number % len(chats)
        start = perf_counter()
        try:
            with closing(Client(url)) as client:
                body = body_of(chats[place], SHORT)
                text = client.streamed(body)[0] if number % 2 else words(client.whole(body))
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            failed.append(repr(error))
            return True
        seconds.append(perf_counter() - start)
        return text == truth[place]

    total, step = requests * rounds, max(1, requests * rounds // 10)
    with ThreadPoolExecutor(at_once) as pool, progress("requests", total) as bar:
        for start in range(0, total, step):
            numbers = range(start, min(total, start + step))
            differing += sum(not same for same in pool.map(ask, numbers))
            memory.append(resident(process))
            asked.append(numbers[-1] + 1)
            bar.update(len(numbers))
    return {
        "requests": total,
        "failed": failed,
        "differing": differing,
        "seconds": seconds,
        "memory": memory,
        "asked": asked,
        "bytes_a_request": slope(asked, memory),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replies", type=int, default=24, help="replies timed for the token rate")
    parser.add_argument("--engine", default="")
    parser.add_argument("--precision", default="")
    parser.add_argument("--mode", default="", help="exact or fast (default: the bundle's)")
    parser.add_argument("--json", type=Path, help="write what was seen to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    load = {name: getattr(given, name) for name in ("engine", "precision", "mode") if getattr(given, name)}
    flags = [word for name, value in load.items() for word in (f"--{name}", value)]
    pair = open_pair(given.bundle, LoadOptions(**load))
    chats = pair.prompts()[:32]
    try:
        with served(given.bundle, flags) as (url, process), closing(Client(url)) as client:
            a_request(client, pair, chats, 20)  # both sides warm
            beside, own = a_request(client, pair, chats, 100)
            served_rates, local_rates, changed = token_rates(url, pair, chats, given.replies)
            load_test = many(url, process, chats, given.requests, given.at_once, given.rounds)
    finally:
        pair.close()
    added = median(beside) - median(own)
    lost = 1 - median([a / b for a, b in zip(served_rates, local_rates, strict=True)])
    waits = sorted(load_test["seconds"])
    growth = load_test["bytes_a_request"]
    exact = pair.mode == EXACT
    wrong = load_test["differing"]
    rows = [
        (
            "added to a request",
            f"{added:.2f} ms ({median(beside):.2f} - {median(own):.2f})",
            f"{BAR_MS:g} ms",
            added <= BAR_MS,
        ),
        ("  slowest tenth of them from", f"{quantile(sorted(beside), 0.9) - median(own):.2f} ms", "", True),
        (
            "tokens a second, streamed",
            f"{median(served_rates):.1f} of {median(local_rates):.1f}: {lost:+.1%} lost",
            f"{BAR_SHARE:.0%}",
            lost <= BAR_SHARE,
        ),
        ("  texts that differ", f"{changed} of {given.replies}", "0 in exact mode", not (exact and changed)),
        (
            f"{load_test['requests']} requests, {given.at_once} at once",
            f"{len(load_test['failed'])} failed, {wrong} differ",
            "0",
            not load_test["failed"] and not (exact and wrong),
        ),
        (
            "  seconds, median / longest",
            f"{median(waits):.2f} / {waits[-1]:.2f}",
            f"{SECONDS:g}",
            waits[-1] <= SECONDS,
        ),
        (
            "  memory of the server",
            f"{load_test['memory'][0] / MIB:.1f} to {load_test['memory'][-1] / MIB:.1f} MiB, {growth:+.0f} bytes a request",
            f"{BAR_BYTES:g}",
            growth <= BAR_BYTES,
        ),
    ]
    print(f"{given.bundle}: {pair.engine} {pair.precision}, {pair.mode} mode, γ = {DRAFT_LENGTH}\n")
    print(table(("", "seen", "bar", ""), [(*row[:3], "" if row[3] else "over") for row in rows], left=3))
    if given.json:
        rates = {"served_rates": served_rates, "local_rates": local_rates}
        write_json(given.json, {"beside_ms": beside, "own_ms": own, **rates, "many": load_test})
    return int(not all(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
