"""A model's step as a chain of pieces: what each computes, holds, keeps and would send on.

Owns the reading of torch.export's graph, and of what went wrong on the way to it.  What is counted
is operations and bytes of the graph, not seconds of a clock: every rank must come to the same plan
without talking to another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from .partition import Piece

# What a second of a device is taken for.  Only the ratio matters: a plan compares stages.
OPERATIONS_S, BYTES_S = 5e10, 1e10
FINE_MAX = 200  # pieces; a model of more is cut between its larger modules alone
BACKWARD = 2.0  # as often as the forward pass: by inputs and by weights
_DRAWING = [0]  # the seed of the micro-batch that this process computes
VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as",
    "slice", "select", "t", "numpy_T", "unbind", "split", "chunk", "alias", "detach", "flatten"})


class Traced(NamedTuple):
    """The chain, and the node of the graph with which each piece begins."""

    pieces: list[Piece]
    begins: list[Any]


def state_factor(group: int) -> float:
    """Bytes of a rank's state by those of its stage's parameters: parameter, gradient and AdamW's
    two moments; in a group parameter and gradient are whole beside a part of what is kept."""
    return 4.0 if group == 1 else 2.0 + 3.0 / group


def read(graph_module: Any, model: nn.Module, prefix: str, group: int = 1) -> Traced:
    """Of an exported program's module; `prefix` is where the model lies in it, `group` how many
    ranks share one copy of a stage."""
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    groups = _groups(calls, model, prefix, whole=False)
    if len(groups) > FINE_MAX:
        groups = _groups(calls, model, prefix, whole=True)
    place = {node: number for number, (_, nodes) in enumerate(groups) for node in nodes}
    used_by: dict[str, set[int]] = {}
    for node in calls:
        for one in _parameters(node):
            used_by.setdefault(one.target, set()).add(place[node])
    shared = {name for name, users in used_by.items() if len(users) > 1}
    cuts = _cut_bytes(calls, place, len(groups))
    factor = state_factor(group)
    pieces = [_piece(name, nodes, cuts[number], shared, used_by, number, prefix, factor)
              for number, (name, nodes) in enumerate(groups)]
    return Traced(pieces, [nodes[0] for _, nodes in groups])


def seeded(graph_module: Any) -> None:
    """Has each operation that draws random numbers draw its own, by its place in the whole graph
    and `seed()`: the same ones whichever stage it is in."""
    number = 0
    for node in graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.args, node.target = (node.target, number, *node.args), drawn
            number += 1


def seed(value: int) -> None:
    """What all that is drawn for a micro-batch follows from."""
    _DRAWING[0] = value


def drawn(operation: Any, number: int, *args: Any, **named: Any) -> Any:
    torch.manual_seed((_DRAWING[0] + number) % 2**63)
    return operation(*args, **named)


def relay(graph_module: Any, begins: list[Any]) -> None:
    """Has every value that skips stages go through each of them; `begins` are the first nodes of
    the stages behind the first.

    Else the stage that makes it would send it to the one that uses it, and under 1F1B with four
    stages and more these two wait for each other: the first for a third forward pass to be taken,
    the last for its first gradient."""
    graph, stage = graph_module.graph, 0
    stages = dict[Any, int]()
    for node in graph.nodes:
        stage += stage < len(begins) and node is begins[stage]
        stages[node] = stage
    for node in [one for one in stages if one.op == "call_function"]:
        first, users = stages[node], list(node.users)
        last = max((stages[user] for user in users), default=first)
        if last < first + 2 or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        sent = {first + 1: node}
        for number in range(first + 1, last):
            with graph.inserting_before(begins[number - 1]):
                sent[number + 1] = graph.call_function(
                    torch.ops.aten.alias.default, (sent[number],))
            sent[number + 1].meta = dict(node.meta)
        for user in users:
            if stages[user] > first + 1:
                user.replace_input_with(node, sent[stages[user]])


def _groups(
    calls: list[Any], model: nn.Module, prefix: str, whole: bool
) -> list[tuple[str, list[Any]]]:
    """Nodes of one module that follow each other; what the model itself does goes with what stands
    before it."""
    groups: list[tuple[str, list[Any]]] = []
    for node in calls:
        name = _piece_of(node, model, prefix, whole)
        if not groups or (name and name != groups[-1][0]):
            groups.append((name or "inputs", []))
        groups[-1][1].append(node)
    return groups


def _piece_of(node: Any, model: nn.Module, prefix: str, whole: bool) -> str:
    """The innermost module, or, of a `whole` one, that nearest to the top which is no mere
    container; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    parts = path.removeprefix(prefix).strip(".").split(".") if path.startswith(prefix) else []
    found, here = list[str](), model
    for part in parts:
        if not part or not hasattr(here, part):
            break
        here = getattr(here, part)
        found.append(part)
        if whole and not isinstance(here, (nn.ModuleList, nn.Sequential)):
            break
    return ".".join(found)


def _parameters(node: Any) -> Iterator[Any]:
    for one in node.all_input_nodes:
        if one.op == "get_attr":
            yield one


def _cut_bytes(calls: list[Any], place: dict[Any, int], count: int) -> list[int]:
    """Behind each piece: every value that was made up to there and is used later."""
    cuts = [0] * count
    for node in calls:
        users = [place[user] for user in node.users if user in place]
        for number in range(place[node], max(users, default=place[node])):
            cuts[number] += _bytes(node)
    return cuts


def _piece(
    name: str, nodes: list[Any], cut: int, shared: set[str], used_by: dict[str, set[int]],
    number: int, prefix: str, factor: float,
) -> Piece:
    held = {one.target: one for node in nodes for one in _parameters(node)}
    # What several pieces use is held where it is used first.
    own = [one for target, one in held.items() if min(used_by[target]) == number]
    operations = sum(_operations(node) for node in nodes)
    moved = sum(_bytes(node) for node in nodes if not _is_view(node))
    forward_s = operations / OPERATIONS_S + 2 * moved / BYTES_S
    return Piece(
        name, forward_s, BACKWARD * forward_s, int(factor * sum(map(_bytes, own))), moved,
        cut,
        tuple(sorted(one.removeprefix(f"{prefix}.") for one in shared & held.keys())),
        sum(map(_bytes, own)))


def _is_view(node: Any) -> bool:
    return str(node.target).split(".")[1:2] != [] and str(node.target).split(".")[1] in VIEWS


def _values(node: Any) -> list[torch.Tensor]:
    value = node.meta.get("val")
    several = value if isinstance(value, (tuple, list)) else [value]
    return [one for one in several if isinstance(one, torch.Tensor)]


def _bytes(node: Any) -> int:
    return sum(int(one.numel()) * one.element_size() for one in _values(node))


def _operations(node: Any) -> float:
    """Multiplications and additions of what is dear; everything else counts by its bytes."""
    kind = str(node.target).split(".")[1] if "." in str(node.target) else ""
    made, given = _values(node), [v for one in node.all_input_nodes for v in _values(one)]
    if not made or not given:
        return 0.0
    numbers = float(made[0].numel())
    if kind in ("linear", "matmul", "mm", "bmm", "addmm"):
        return 2.0 * numbers * given[0].shape[-1]
    if kind == "scaled_dot_product_attention":
        return 4.0 * numbers * given[1].shape[-2]
    if kind.startswith("conv") and len(given) > 1:
        return 2.0 * numbers * math.prod(given[1].shape[1:])
    return 0.0


def root_of(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__
