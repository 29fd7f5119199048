"""Makes the page of all public names from the source, so signatures are as they are written."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

# The names of each module; None: its `__all__`.
MODULES: dict[str, tuple[str, ...] | None] = {
    "coatcheck": None,
    "coatcheck.server.asgi": ("IdempotencyMiddleware",),
    "coatcheck.server.wsgi": ("IdempotencyMiddleware",),
    "coatcheck.server.fastapi": None,
    "coatcheck.server.starlette": None,
    "coatcheck.server.flask": ("Coatcheck", "idempotent"),
    "coatcheck.server.litestar": None,
    "coatcheck.server.django": None,
    "coatcheck.server.django.openapi": ("state_guarded_views",),
    "coatcheck.server.routes": (
        *("RoutePolicies", "NewRoutes", "idempotent", "mark_of", "policy_of_mark"),
        *("found", "found_unguarded"),
    ),
    "coatcheck.openapi": None,
    "coatcheck.server.request": ("Request",),
    "coatcheck.server.callers": (
        *("Caller", "AsyncCaller", "Named", "Refused", "credential", "api_key", "cookie"),
        *("jwt", "user", "client_certificate", "client_address"),
    ),
    "coatcheck.server.keys": ("by_content",),
    "coatcheck.client": (
        *("ClientSettings", "BufferSettings", "RetryPolicy", "RetryBudget", "Preset"),
        *("Action", "Result", "Clock", "result_of"),
    ),
    "coatcheck.client.httpx2": ("Client", "AsyncClient", "Transport", "AsyncTransport"),
    "coatcheck.client.requests": ("Session",),
    "coatcheck.client.aiohttp": ("ClientSession", "Middleware"),
    "coatcheck.client.outbox": (
        *("Outbox", "Ticket", "AsyncOutbox", "AsyncTicket"),
        *("Done", "Refused", "Pending", "Unknown", "SendAgain"),
    ),
    "coatcheck.client.outbox_store": ("Stored",),
    "coatcheck.client.optimistic": ("OptimisticQueue", "AsyncOptimisticQueue"),
    "coatcheck.consumer": (
        *("Inbox", "Handler", "Message", "Headers", "Reject"),
        *("Acknowledge", "Redeliver", "DeadLetter"),
    ),
    "coatcheck.consumer.event_ids": (
        *("published_id", "message_id", "header", "cloudevent", "delivery_id"),
    ),
    "coatcheck.consumer.rabbitmq": ("consume", "publisher"),
    "coatcheck.consumer.relay": ("Relay", "OutgoingEvent"),
    "coatcheck.saga": None,
    "coatcheck.consumer.nats": ("consume",),
    "coatcheck.consumer.redis_streams": ("consume",),
    "coatcheck.consumer.kafka": ("consume",),
    "coatcheck.consumer.aiokafka": ("consume",),
    "coatcheck.consumer.sqs": ("consume",),
    "coatcheck.consumer.faststream": ("InboxMiddleware",),
    "coatcheck.stores": None,
    "coatcheck.telemetry": (
        *("Decision", "Observer", "log_decision", "Listener", "OperationEvent", "WriteEvent"),
        *(
            "Claimed",
            "Waited",
            "Renewed",
            "Lost",
            "Completed",
            "Released",
            "InDoubt",
            "Recovered",
            "Swept",
            "CountedInDoubt",
        ),
    ),
    "coatcheck.metrics.prometheus": ("Metrics", "instrument"),
    "coatcheck.metrics.opentelemetry": ("Telemetry", "instrument"),
    "coatcheck.core.record": ("Swap",),
    "coatcheck.core.progress": ("Note",),
    "coatcheck.core.describe": ("facts_of",),
    "coatcheck.testing": None,
    "coatcheck.verify.crash": ("Point", "Injector", "kill", "freeze", "fail", "Injected"),
}

# Documented on a page of its own.
ELSEWHERE = {"Policy": "policy.md"}
# The inherited methods that users call.
INHERITED = {
    *("action", "close", "instrument", "listen", "register"),
    *("outcome", "dead_letters", "retry", "discard", "forget"),
    *("travel", "travel_past_lease", "travel_past_window"),
}
# Used by other packages of the library, not by users.
OURS = {
    *("AsyncOperation.__init__", "Operation.__init__", "Operation.check_steps"),
    *("Operation.record_step", "Saga.__init__", "Saga.failure_after", "Saga.undo"),
    *("AsyncSaga.__init__", "SagaFunction.__init__"),
}

LINE_COLUMNS_MAX = 88
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file of the source."""

    name: str
    text: str
    tree: ast.Module

    def words(self, node: ast.AST) -> str:
        """Return the source of *node*, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())


class Thing(NamedTuple):
    """A named definition and its module."""

    module: Module
    node: ast.stmt


@cache
def module(name: str) -> Module:
    """Read the source of the module *name*."""
    found = importlib.util.find_spec(name)
    assert found is not None, name
    assert found.origin is not None, name
    text = Path(found.origin).read_text(encoding="utf-8")
    return Module(name, text, ast.parse(text))


def find(where: Module, name: str) -> Thing | None:
    """Return the definition of *name* in *where*, through all imports; None: not in this package."""
    body = [inner for node in where.tree.body for inner in _with_type_checking(node)]
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
            if not _is_overload(node):
                return Thing(where, node)
            continue
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            ours = (node.module or "").partition(".")[0] == "coatcheck"
            return find(module(node.module or ""), name) if ours else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return Thing(where, node)
    return None


def _with_type_checking(node: ast.stmt) -> list[ast.stmt]:
    """Return *node*, or what it defines for type checkers only."""
    is_block = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return node.body if is_block else [node]


def _is_overload(node: ast.stmt) -> bool:
    return any(ast.unparse(d) == "overload" for d in getattr(node, "decorator_list", ()))


def page(note: str) -> str:
    """Return the page: every public name with its signature and docstring."""
    lines = [note, "# API\n"]
    seen: dict[Thing, str] = {}
    for name, listed in MODULES.items():
        where = module(name)
        lines += [f"## {name}\n", (ast.get_docstring(where.tree) or "") + "\n"]
        for public in listed or _all_of(where):
            thing = find(where, public)
            assert thing, f"{name} has no {public}"
            lines.append(f"### `{public}`\n")
            if thing in seen:
                link = seen[thing].replace(".", "")
                lines.append(f"The same as in [{seen[thing]}](#{link}).\n")
            else:
                seen[thing] = name
                lines += _described(public, thing)
    lines += ["## Types in these signatures\n", "```python"]
    lines += sorted(_aliases(seen))
    return "\n".join([*lines, "```"]) + "\n"


def _all_of(where: Module) -> list[str]:
    thing = find(where, "__all__")
    assert thing is not None, f"say what is public in {where.name}"
    assert isinstance(thing.node, ast.Assign)
    return [str(name) for name in ast.literal_eval(thing.node.value)]


def _described(name: str, thing: Thing) -> Iterator[str]:
    where, node = thing
    if isinstance(node, FUNCTIONS):
        yield from _function(where, node)
    elif isinstance(node, ast.ClassDef):
        yield from _class(name, thing)
    else:
        yield f"```python\n{ast.get_source_segment(where.text, node)}\n```\n"
        yield _comment_above(where, node) + "\n"


def _comment_above(where: Module, node: ast.stmt) -> str:
    said: list[str] = []
    for line in reversed(where.text.splitlines()[: node.lineno - 1]):
        if not line.startswith("# "):
            break
        said.insert(0, line.removeprefix("# "))
    return " ".join(said)


# ------------------------------------------------------------------------------------- classes


def _class(name: str, thing: Thing) -> Iterator[str]:
    where, node = thing
    assert isinstance(node, ast.ClassDef)
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    made = _method(thing, "__init__")
    if fields and name not in ELSEWHERE:
        yield f"```python\n{_with_fields(where, node, fields)}\n```\n"
    elif where.name == "coatcheck.errors":  # users catch it, so its base class matters
        yield f"```python\n{_head(where, node)}\n```\n"
    elif made and f"{name}.__init__" not in OURS:
        yield f"```python\n{_signature(*made, called=name)}\n```\n"
    yield prose(ast.get_docstring(node))
    if name in ELSEWHERE:
        yield f"Every field: [{ELSEWHERE[name]}]({ELSEWHERE[name]}).\n"
    for origin, method in _methods(thing):
        yield f"#### `{name}.{method.name}`\n"
        yield from _function(origin, method)


def _with_fields(where: Module, node: ast.ClassDef, fields: list[ast.AnnAssign]) -> str:
    """Return a class that consists of fields, each with its comment."""
    lines = where.text.splitlines()
    end = fields[-1].end_lineno or fields[-1].lineno
    return "\n".join([_head(where, node) + ":", *lines[fields[0].lineno - 1 : end]])


def _head(where: Module, node: ast.ClassDef) -> str:
    bases = ", ".join(where.words(base) for base in node.bases)
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def _bases(thing: Thing) -> Iterator[Thing]:
    """Return the class and its base classes in this package, nearest first."""
    yield thing
    assert isinstance(thing.node, ast.ClassDef)
    for given in thing.node.bases:
        base = given.value if isinstance(given, ast.Subscript) else given
        found = find(thing.module, base.id) if isinstance(base, ast.Name) else None
        if found:
            yield from _bases(found)


def _method(thing: Thing, name: str) -> tuple[Module, Function] | None:
    for where, node in _bases(thing):
        for one in getattr(node, "body", ()):
            if isinstance(one, FUNCTIONS) and one.name == name:
                return where, one
    return None


def _methods(thing: Thing) -> Iterator[tuple[Module, Function]]:
    assert isinstance(thing.node, ast.ClassDef)
    ours = {name.rpartition(".")[2] for name in OURS if name.startswith(f"{thing.node.name}.")}
    for where, node in _bases(thing):
        for one in getattr(node, "body", ()):
            if (
                isinstance(one, FUNCTIONS)
                and not one.name.startswith("_")
                and not _is_overload(one)
            ):
                is_listed = node is thing.node or one.name in INHERITED
                if is_listed and one.name not in ours:
                    yield where, one


# ----------------------------------------------------------------------------------- functions


def _function(where: Module, node: Function) -> Iterator[str]:
    kinds = [where.words(decorator) for decorator in node.decorator_list]
    if "property" in kinds:
        words = f"{node.name}: {where.words(node.returns) if node.returns else ''}"
    else:
        words = "".join(f"@{kind}\n" for kind in kinds) + _signature(where, node)
    yield f"```python\n{words}\n```\n"
    yield prose(ast.get_docstring(node))


def _signature(where: Module, node: Function, called: str = "") -> str:
    """Return the signature without self; for a class, as a call of *called*."""
    word = "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    head = called or word + node.name
    tail = "" if called or not node.returns else f" -> {where.words(node.returns)}"
    parts = [part for part in _parameters(where, node.args) if part not in ("self", "cls")]
    line = f"{head}({', '.join(parts)}){tail}"
    if len(line) <= LINE_COLUMNS_MAX:
        return line
    return "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){tail}"])


def _parameters(where: Module, args: ast.arguments) -> Iterator[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    for place, (one, default) in enumerate(
        zip(positional, [*defaults, *args.defaults], strict=True), 1
    ):
        yield _parameter(where, one, default)
        if place == len(args.posonlyargs):
            yield "/"
    if args.vararg:
        yield "*" + _parameter(where, args.vararg)
    elif args.kwonlyargs:
        yield "*"
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(where, one, default)
    if args.kwarg:
        yield "**" + _parameter(where, args.kwarg)


def _parameter(where: Module, one: ast.arg, default: ast.expr | None = None) -> str:
    typed = f"{one.arg}: {where.words(one.annotation)}" if one.annotation else one.arg
    if default is None:
        return typed
    thing = find(where, default.id) if isinstance(default, ast.Name) else None
    if thing and isinstance(thing.node, ast.Assign):  # a constant: show its value
        return f"{typed} = {thing.module.words(thing.node.value)}"
    return f"{typed}{' = ' if one.annotation else '='}{where.words(default)}"


# --------------------------------------------------------------------------------------- words


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown, with its arguments as a list."""
    words, _, args = inspect.cleandoc(docstring or "").partition("Args:\n")
    items = re.split(r"^ {4}(\**\w+): ", args, flags=re.MULTILINE)[1:]
    pairs = zip(items[::2], items[1::2], strict=True)
    listed = "".join(f"- `{name}`: {' '.join(text.split())}\n" for name, text in pairs)
    return words.rstrip("\n") + "\n" + (f"\n{listed}" if listed else "")


def _aliases(things: dict[Thing, str]) -> set[str]:
    """Return the type aliases that signatures use and that are not listed."""
    found: set[str] = set()
    for thing in things:
        for where, node in _annotated(thing):
            for name in (one.id for one in ast.walk(node) if isinstance(one, ast.Name)):
                alias = find(where, name)
                if alias and isinstance(alias.node, ast.AnnAssign) and alias not in things:
                    assert alias.node.value
                    words = alias.module.words(alias.node.value).strip('"')
                    found.add(f"{name} = {words}  # {alias.module.name}")
    return found


def _annotated(thing: Thing) -> Iterator[tuple[Module, ast.expr]]:
    """Yield every annotation in the signatures of *thing*."""
    where, node = thing
    functions = [(where, node)] if isinstance(node, FUNCTIONS) else []
    if isinstance(node, ast.ClassDef):
        yield from ((where, one.annotation) for one in node.body if isinstance(one, ast.AnnAssign))
        functions = [*_methods(thing), *filter(None, [_method(thing, "__init__")])]
    for origin, function in functions:
        for part in ast.walk(function.args):
            if isinstance(part, ast.arg) and part.annotation:
                yield origin, part.annotation
        if function.returns:
            yield origin, function.returns
