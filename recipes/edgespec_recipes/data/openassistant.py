"""OpenAssistant's message trees: built from single messages, and the best ranked path through one. Knows no files.

A message has a text and a role (prompter or assistant), perhaps a rank among its siblings (0 is the best) and the mark `deleted`.
"""

from __future__ import annotations

from typing import Any

from edgespec_runtime.text.tokenizer import Message

from edgespec.core.errors import InputError
from edgespec_recipes.data.sources import Numbered

ROLES = {"prompter": "user", "assistant": "assistant"}
MOST_TURNS = 1000  # every answered one makes a conversation with all before it
_ANSWERED_BY = {"prompter": "assistant", "assistant": "prompter"}

Tree = dict[str, Any]


def trees_of(rows: Numbered) -> tuple[list[tuple[str, Tree]], int]:
    """Messages in any order -> (their trees, each with where its root is from; how many messages hang on one that is not there).

    Raises InputError: a row that is no message, an id used twice, messages that answer each other in a circle.
    """
    nodes: dict[str, tuple[str, Tree]] = {}
    for where, row in rows:
        name = row.get("message_id")
        if not isinstance(name, str):
            raise InputError(f"{where} has the message_id {name!r}; it must be a string")
        if name in nodes:
            raise InputError(f"{where} has the message_id {name!r} of {nodes[name][0]}; remove one of them")
        nodes[name] = (where, {**row, "replies": []})
    roots, orphans = [], []
    for where, node in nodes.values():
        parent = node.get("parent_id")
        if parent is None:
            roots.append((where, node))
        elif isinstance(parent, str) and parent in nodes:
            nodes[parent][1]["replies"].append(node)
        else:
            orphans.append((where, node))
    found, left_out = _names_below(roots), _names_below(orphans)
    if circle := nodes.keys() - found - left_out:
        name = min(circle)
        raise InputError(f"{nodes[name][0]}: the message {name!r} is its own ancestor; correct its parent_id")
    return roots, len(left_out)


def _names_below(trees: list[tuple[str, Tree]]) -> set[str]:
    names, waiting = set(), [node for _, node in trees]
    while waiting:
        node = waiting.pop()
        names.add(node["message_id"])
        waiting += node["replies"]
    return names


def best_path(tree: Tree, where: str) -> list[Message]:
    """The turns from the root on, each the best ranked reply to the one before. Raises InputError: a node that is no message.

    A message without rank comes after those with one; between equals the message_id decides, so that the order of rows does not.
    """
    turns: list[Message] = []
    nodes, role = [_checked(tree, "prompter", where)], "prompter"
    while nodes := [node for node in nodes if node["role"] == role and not node.get("deleted")]:
        best = min(nodes, key=_place)
        turns.append({"role": ROLES[role], "content": best["text"]})
        if len(turns) > MOST_TURNS:
            raise InputError(f"{where} begins a path of more than {MOST_TURNS:,} messages; cut it")
        role = _ANSWERED_BY[role]
        replies = best.get("replies") or []
        if not isinstance(replies, list):
            raise InputError(f"{where} has the replies {str(replies)[:60]!r}; they must be a list")
        nodes = [_checked(reply, role, where) for reply in replies]
    return turns


def _checked(node: Any, role: str, where: str) -> Tree:
    """The node with its role, which is that of its place where it tells none. Raises InputError."""
    if not isinstance(node, dict) or not isinstance(node.get("text"), str):
        raise InputError(f"{where} has the message {str(node)[:60]!r}; it needs a text (a string)")
    seen = str(node.get("role") or role)
    if seen not in ROLES:
        raise InputError(f"{where} has the role {seen!r}; it must be {' or '.join(ROLES)}")
    return {**node, "role": seen}


def _place(node: Tree) -> tuple[float, str]:
    rank = node.get("rank")
    if not isinstance(rank, int | float) or rank != rank:
        rank = float("inf")
    return rank, str(node.get("message_id", ""))  # no float of it: JSON has whole numbers beyond those
