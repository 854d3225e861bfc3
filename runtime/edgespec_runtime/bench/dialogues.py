"""Questions as token ids: the prompt of every turn, behind the target's own replies to the turns before. Runs no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.core.errors import InputError
from edgespec_runtime.bench.report import LEAST_PROMPTS, Category, Run, Summary, by_category, compared
from edgespec_runtime.bench.suite import Question
from edgespec_runtime.chat.conversation import Conversation
from edgespec_runtime.text.tokenizer import ChatTokenizer


class Dialogue:
    """One question and its prompts so far.

    Every rival reads the same prompt in a turn: the target's plain reply of the first round stands in it for all of them.

    Attributes:
        prompts: ids of the first turn and of every turn whose predecessor was answered.
        left_out: turns for which the context has no room.
    """

    def __init__(self, tokenizer: ChatTokenizer, question: Question, room: int | None = None) -> None:
        self.question = question
        self.left_out = 0
        self._room = room
        self._conversation = Conversation(tokenizer)
        self._conversation.messages = list(question.before)
        try:
            self.prompts = [self._conversation.prompt(question.turns[0])]
        except InputError as error:
            raise InputError(f"{question.where}: {error}" if question.where else str(error)) from error

    def answer(self, reply: Sequence[int]) -> None:
        """Take the target's reply to the last prompt; the next turn's prompt is there then, if its question has one."""
        turns, turn = self.question.turns, len(self.prompts) - 1
        self._conversation.add(turns[turn], self.prompts[turn], reply)
        if turn + 1 == len(turns):
            return
        prompt = self._conversation.prompt(turns[turn + 1])
        if self._room is not None and len(prompt) > self._room:
            self.left_out = len(turns) - turn - 1
        else:
            self.prompts.append(prompt)


@dataclass(frozen=True)
class Questions:
    """The prompts of a bench. `too_long`: questions that were left out because the context has no room for them."""

    dialogues: Sequence[Dialogue]
    too_long: int = 0

    @property
    def least(self) -> int:
        return LEAST_PROMPTS * len({one.question.category for one in self.dialogues})

    @property
    def turns_left_out(self) -> int:
        return sum(one.left_out for one in self.dialogues)

    def by_category(self, runs: Sequence[Run], summaries: Sequence[Summary]) -> list[Category]:
        names = {index: one.question.category for index, one in enumerate(self.dialogues)}
        return [row for s in compared(summaries) for row in by_category(runs, names, s.draft_length)]


def fitting_dialogues(
    tokenizer: ChatTokenizer, questions: Iterable[Question], room: int, most: int
) -> Questions:
    """The first `most` questions whose first turn has at most `room` tokens, and how many were too long on the way.

    Raises InputError where none fits.
    """
    found: list[Dialogue] = []
    shortest, too_long = 0, 0
    for question in questions:
        if len(found) == most:
            break
        dialogue = Dialogue(tokenizer, question, room)
        length = len(dialogue.prompts[0])
        if length <= room:
            found.append(dialogue)
        else:
            too_long += 1
            shortest = min(shortest or length, length)
    if not found:
        raise InputError(
            f"the shortest prompt has {shortest} tokens, and the context has room for {room} beside the reply; "
            "give shorter ones, for a suite a smaller --max-new-tokens, or a longer --context if the model has one"
        )
    return Questions(found, too_long)
