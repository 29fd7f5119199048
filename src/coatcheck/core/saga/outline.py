"""The outline of a saga: the steps that its function names, read from the source.

It is stored when a saga begins, and compared when another process continues it: a function whose
steps have changed does not continue what another one began. It is also what a picture of the
definition shows. Steps that a function takes through helpers of its own are not in it; for those,
`core/steps.py` finds at run time that the recorded steps differ.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

# 3 000: a note has room for 4 096 bytes.
_BYTES_MAX = 3_000


class OutlineStep(NamedTuple):
    """A step in the source of a saga, or its pivot; *group*: the `saga.gather` it is part of."""

    name: str
    function: str = ""
    undo: str = ""
    probe: str = ""
    is_pivot: bool = False
    group: int = 0


def read_outline(source: str, *, is_method: bool = False) -> tuple[OutlineStep, ...]:
    """
    The steps of the function in *source*, in the order in which it names them.

    The saga is the first argument of the function, or the second of a method.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a part of a line, such as a lambda
        return ()
    function = next((node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)), None)
    arguments = [] if function is None else function.args.posonlyargs + function.args.args
    if function is None or len(arguments) <= is_method:
        return ()
    return tuple(_Reader(arguments[is_method].arg).steps_in(function, 0))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Reader:
    """Reads the calls of one parameter: the saga."""

    def __init__(self, saga: str) -> None:
        self._saga = saga
        self._groups = 0

    def steps_in(self, node: ast.AST, group: int) -> Iterator[OutlineStep]:
        """The steps below *node*, in the order of the source."""
        method = self._method_of(node)
        if method == "gather":
            self._groups += 1
            group = group or self._groups
        if method == "step" and isinstance(node, ast.Call) and node.args:
            yield _step_of(node, group)
        elif method == "pivot":
            yield OutlineStep("pivot", is_pivot=True)
        for child in ast.iter_child_nodes(node):
            yield from self.steps_in(child, group)

    def _method_of(self, node: ast.AST) -> str:
        """The name of the method of the saga that *node* calls; empty: it calls none."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                return method if name == self._saga else ""
        return ""


def _step_of(call: ast.Call, group: int) -> OutlineStep:
    name = call.args[0]
    is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
    shown = str(ast.literal_eval(name)) if is_text else ast.unparse(name)
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return OutlineStep(
        shown,
        ast.unparse(call.args[1]) if len(call.args) > 1 else "",
        words.get("undo", ""),
        words.get("probe", ""),
        group=group,
    )


def signature_of(outline: tuple[OutlineStep, ...]) -> list[str]:
    """What may not change while a saga runs: the names of its steps, their undos, the pivot."""
    names = [f"{s.name} (undo)" if s.undo else s.name for s in outline]
    while sum(len(name) + 8 for name in names) > _BYTES_MAX:
        names = names[: len(names) // 2]
    return names


def changed_words(began: list[str], now: list[str]) -> str:
    """How the steps of a definition differ from those that the saga *began* with."""
    gone = [name for name in dict.fromkeys(began) if name not in now]  # one may be in two branches
    new = [name for name in dict.fromkeys(now) if name not in began]
    parts = [f"{', '.join(gone)} gone"] * bool(gone) + [f"{', '.join(new)} new"] * bool(new)
    return "its definition has changed since it began: " + (
        "; ".join(parts) or "the order of its steps"
    )
