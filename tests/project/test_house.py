"""The house rules that a machine can hold, over the source text itself.

Numbers, names, purity of core, honesty of the tests, and that every promise has a test. Each test
collects all offences before it fails, so that one run tells everything there is to mend.
"""

import ast
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "coatcheck"
TESTS = ROOT / "tests"

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 40
# The path of every request may be one long, straight function; its first line says so.
HOT_PATH = "hot path: straight on purpose"
HOT_PATH_LINES_MAX = 80
FILE_LINES_MAX = 600
MODULES_IN_A_FOLDER_MAX = 25
POSITIONAL_MAX = 5
ROOM_README_LINES_MAX = 10
TEST_NAME_WORDS_MIN = 4

NAMELESS_MODULES = {"utils", "util", "helpers", "common", "manager", "misc"}

# The glossary's right-hand column: a synonym is a defect, because one word has one meaning here.
SYNONYMS = {"ttl", "namespace", "payload", "checksum", "reservation", "etag", "reap", "prune"}

# Core is told what time it is and asks for what it wants done.
IMPURE_MODULES = {
    *("asyncio", "concurrent", "contextvars", "multiprocessing", "queue", "sched", "threading"),
    *("random", "secrets", "time"),
    *("logging", "os", "pathlib", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess"),
    *("sys", "tempfile", "warnings"),
}
IMPURE_CALLS = {
    *("open", "print", "input", "breakpoint", "exec", "eval"),
    *("now", "utcnow", "today", "uuid1", "uuid4", "uuid7"),
}

# One extra = one file or one folder: the only places where a third-party package may be imported.
THIRD_PARTY = {
    "cli": {"click", "rich"},
    "client/aiohttp.py": {"aiohttp", "yarl"},
    "consumer/celery.py": {"celery"},
    "consumer/dramatiq.py": {"dramatiq"},
    "consumer/procrastinate.py": {"procrastinate"},
    "consumer/rabbitmq.py": {"aio_pika", "pamqp"},
    "consumer/rq.py": {"rq"},
    "client/httpx.py": {"httpx"},
    "client/httpx2.py": {"httpx2"},
    "client/outbox_postgres.py": {"psycopg"},
    "client/requests.py": {"requests", "urllib3"},
    "consumer/aiokafka.py": {"aiokafka"},
    "consumer/faststream.py": {"faststream"},
    "consumer/kafka.py": {"confluent_kafka"},
    "consumer/nats.py": {"nats"},
    "consumer/redis_streams.py": {"redis"},
    "consumer/sqs.py": {"boto3", "botocore"},
    "metrics/opentelemetry.py": {"opentelemetry"},
    "metrics/prometheus.py": {"prometheus_client"},
    "server/cookies.py": {"itsdangerous"},
    "server/fastapi.py": {"fastapi"},
    "server/flask.py": {"click", "flask", "flask_login", "werkzeug"},
    "server/litestar.py": {"litestar"},
    "server/django": {"asgiref", "django", "rest_framework"},
    "server/django/management/commands": {"django"},
    "server/tokens.py": {"jwt"},
    "testing": {"pytest"},
    "keyring.py": {"cryptography"},
    "stores/sqlite": {"aiosqlite"},
    "stores/postgres": {"asyncpg", "psycopg"},
    "stores/mysql": {"asyncmy", "pymysql"},
    "stores/redis": {"redis"},
    "stores/dynamodb": {"botocore"},
    "transactions/asyncpg.py": {"asyncpg"},
    "transactions/psycopg.py": {"psycopg"},
}

# The promises kept so far, by their ids; each is carried by the docstring or the name of a test.
PROMISES = (
    *("K1", "K2", "K3", "K4", "K5"),
    *("S1", "S2", "S3", "S4"),
    *("F1", "F2", "F3"),
    *("L1", "L2", "L3", "L4", "L5", "L6", "L7", "L8", "L9", "L10", "L11", "L12"),
    *("T1", "T2", "T3", "T4"),
    *("C1", "C2", "C3", "C4", "C5"),
    *("D1", "D2", "D3", "D4"),
    *("E1", "E2", "E4", "E5"),
    *("X1", "X2", "X3"),
    *("R1", "R2", "R3", "R4", "R5", "V2", "V3"),
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of them, walked once for all tests that look at them."""
    return tuple(ast.walk(parsed(path)))


def modules(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"nothing to look at in {folder}"
    return found


def functions(path: Path) -> Iterator[FunctionNode]:
    return (node for node in nodes(path) if isinstance(node, FUNCTIONS))


def imports(path: Path) -> Iterator[tuple[ast.stmt, str, str]]:
    """Every imported (module, name), also inside functions; the name is empty for `import x`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, node.module or "", alias.name) for alias in node.names)


def at(path: Path, node: ast.AST | int, what: str) -> str:
    line = node if isinstance(node, int) else node.lineno  # type: ignore[attr-defined] # a stmt
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def report(offences: list[str]) -> None:
    assert not offences, "\n".join(("", *offences))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


# ------------------------------------------------------------------------------------- numbers


def test_lines_and_files_are_short_enough_to_read():
    offences = []
    for path in modules(SOURCE):
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > FILE_LINES_MAX:
            offences.append(at(path, len(lines), f"longer than {FILE_LINES_MAX} lines"))
        # As the formatter counts: a note to a tool at the end of a line is not part of it.
        bare = [re.sub(r"\s*# (noqa|type: ignore|pyright: ignore).*", "", line) for line in lines]
        offences += [
            at(path, number, f"{len(line)} columns")
            for number, line in enumerate(bare, 1)
            if len(line) > LINE_COLUMNS_MAX
        ]
    report(offences)


def test_a_folder_holds_few_enough_modules_to_survey():
    folders = {path.parent for path in modules(SOURCE)}
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders}
    report([at(f, 1, f"{n} modules") for f, n in counts.items() if n > MODULES_IN_A_FOLDER_MAX])


def test_functions_fit_on_a_screen_and_take_few_parameters():
    offences = []
    for path in modules(SOURCE):
        for function in functions(path):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
            is_hot = HOT_PATH in path.read_text().splitlines()[function.lineno - 1]
            if lines > (HOT_PATH_LINES_MAX if is_hot else FUNCTION_LINES_MAX):
                offences.append(at(path, function, f"{function.name}: {lines} lines"))
            positional = [*function.args.posonlyargs, *function.args.args]
            count = len([a for a in positional if a.arg not in ("self", "cls")])
            if count > POSITIONAL_MAX:
                offences.append(at(path, function, f"{function.name}: {count} positional"))
    report(offences)


# --------------------------------------------------------------------------------------- names


def test_no_module_is_named_after_nothing():
    named = [*modules(SOURCE), *modules(TESTS)]
    report([at(p, 1, p.stem) for p in named if {p.stem, p.parent.name} & NAMELESS_MODULES])


def test_one_word_has_one_meaning():
    offences = []
    for path in modules(SOURCE):
        for node in nodes(path):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            words = re.findall(r"[a-z]+|[A-Z][a-z]*", name)
            if SYNONYMS & {word.lower() for word in words}:
                offences.append(at(path, node, name))
    report(offences)


def test_every_module_and_every_public_thing_is_explained():
    offences = []
    for path in modules(SOURCE):
        tree = parsed(path)
        if not ast.get_docstring(tree):
            offences.append(at(path, 1, "the module says nothing"))
        for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            if isinstance(owner, ast.ClassDef) and owner.name.startswith("_"):
                continue
            offences += [
                at(path, node, node.name)
                for node in owner.body
                if isinstance(node, (*FUNCTIONS, ast.ClassDef))
                and not node.name.startswith("_")
                and not any("overload" in ast.unparse(d) for d in node.decorator_list)
                and not ast.get_docstring(node)
            ]
    report(offences)


def test_every_package_says_what_may_not_be_in_it():
    offences = []
    for init in SOURCE.glob("*/__init__.py"):
        readme = init.with_name("README.md")
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        if "may not be in here" not in text or text.count("\n") > ROOM_README_LINES_MAX:
            offences.append(str(readme.relative_to(ROOT)))
    report(offences)


def test_nothing_is_left_to_do_and_every_exception_has_a_reason():
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    silenced = re.compile(r"#\s*(noqa|type: ignore|pyright: ignore|pragma: no)\b(.*)")
    reasoned = re.compile(r"[:\[][A-Za-z0-9, \-]+\]?\s+[-#(]\s*\w+")
    offences = []
    for path in modules(SOURCE):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if unfinished.search(line):
                offences.append(at(path, number, line.strip()))
            if (found := silenced.search(line)) and not reasoned.search(found[2]):
                offences.append(at(path, number, f"silenced without a reason: {found[0]}"))
    report(offences)


# --------------------------------------------------------------------------------- plain words

# Ids of promises belong in tests: a user or a newcomer cannot look them up.
PROMISE_ID = re.compile(r"\b(?:[KSFLTDCEOVXR]\d{1,2}|[SC]-\d\d)\b")
# What looks like an id and is none: a service, a network layer.
NO_PROMISE_ID = {"S3", "L4", "L7"}
# Riddles and metaphors: the actor has a name, and code returns, raises, logs or sends.
RIDDLES = re.compile(
    r"(?i:\b(?:whoever|whomever|nobody|somebody|parked|lent|fate|hears?|heard|(?:is|are|be) told"
    r"|what stands|told of)\b)|\bElse [a-z]"
)
WRITTEN = (".md", ".sql", ".lua", ".js")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Each line for readers: of a page all, of a module its comments, docstrings and messages."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".py":
        yield from enumerate(lines, 1)
        return
    for token in tokenize.generate_tokens(iter(f"{line}\n" for line in [*lines, ""]).__next__):
        if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield number, re.sub(r"#\s*noqa.*", "", line)


def test_source_and_docs_have_no_promise_ids_and_no_riddles():
    """A reader understands each sentence without our list of promises, on the first reading."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    pages += [path for path in SOURCE.rglob("*") if path.suffix in WRITTEN]
    offences = []
    for path in [*modules(SOURCE), *sorted(page for page in pages if page.exists())]:
        for number, line in prose(path):
            found = [m[0] for m in PROMISE_ID.finditer(line) if m[0] not in NO_PROMISE_ID]
            found += [m[0] for m in RIDDLES.finditer(line)]
            offences += [at(path, number, what.strip()) for what in found]
    report(offences)


LOG_CALLS = {f"logger.{level}" for level in ("info", "warning", "error", "exception", "log")}


def test_every_log_line_begins_with_our_name():
    """O3: a server without logging settings prints our lines bare, among those of others."""
    texts = {
        ast.unparse(node.targets[0]): node.value.value
        for path in modules(SOURCE)
        for node in nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    offences = []
    for path in modules(SOURCE):
        for node in nodes(path):
            if isinstance(node, ast.Call) and name_of(node) in LOG_CALLS:
                message = node.args[name_of(node) == "logger.log"]  # the level comes first
                text = message.value if isinstance(message, ast.Constant) else ""
                if not (text or texts.get(ast.unparse(message), "")).startswith("coatcheck: "):
                    offences.append(at(path, node, ast.unparse(message)))
    report(offences)


# ---------------------------------------------------------------------------------- who may what


def test_core_reads_no_clock_draws_no_number_and_does_no_io():
    offences = []
    for path in modules(SOURCE / "core"):
        offences += [
            at(path, node, module)
            for node, module, _name in imports(path)
            if module.partition(".")[0] in IMPURE_MODULES
        ]
        offences += [
            at(path, node, name_of(node))
            for node in nodes(path)
            if isinstance(node, ast.Call) and name_of(node).rpartition(".")[2] in IMPURE_CALLS
        ]
    report(offences)


def test_flows_state_which_type_comes_back_from_an_effect():
    """`yield from effect` knows; a bare `yield` has no type, unless what it is put into has one."""
    offences = []
    for path in modules(SOURCE / "core"):
        for function in functions(path):
            returns = ast.unparse(function.returns) if function.returns else ""
            if returns.startswith(("Iterator[", "Iterable[")):
                continue
            if function.name == "__iter__" and path.name == "flow.py":
                continue
            typed = [node for node in ast.walk(function) if isinstance(node, ast.AnnAssign)]
            known = {id(inner) for node in typed for inner in ast.walk(node)}
            bare = (node for node in ast.walk(function) if isinstance(node, ast.Yield))
            offences += [
                at(path, node, f"bare yield in {function.name}")
                for node in bare
                if id(node) not in known
            ]
    report(offences)


def test_third_party_packages_are_imported_in_their_own_place():
    offences = []
    for path in modules(SOURCE):
        inside = path.relative_to(SOURCE)
        places = (inside.as_posix(), inside.parent.as_posix())
        allowed = set().union(*(THIRD_PARTY.get(place, set()) for place in places))
        allowed = allowed | sys.stdlib_module_names | {"coatcheck"}
        offences += [
            at(path, node, module)
            for node, module, _name in imports(path)
            if module.partition(".")[0] not in allowed
        ]
    report(offences)


# ---------------------------------------------------------------------------------------- tests


def test_names_of_tests_are_sentences():
    offences = []
    for path in modules(TESTS):
        for function in functions(path):
            words = function.name.split("_")
            if words[0] == "test" and len(words) - 1 < TEST_NAME_WORDS_MIN:
                offences.append(at(path, function, function.name))
    report(offences)


def test_no_test_sleeps_to_be_lucky():
    """A test waits on an event; only what polls until a deadline may pause between two looks."""
    offences = []
    for path in modules(TESTS):
        for function in functions(path):
            pauses = [
                at(path, node, ast.unparse(node))
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and name_of(node).rpartition(".")[2] == "sleep"
                and node.args[0].value > 0
            ]
            if pauses and not re.search(r"deadline|timeout", ast.unparse(function)):
                offences += pauses
    report(offences)


def test_no_test_is_skipped_or_expected_to_fail():
    excuses = {"skip", "skipif", "xfail", "importorskip", "skipTest"}
    offences = []
    for path in modules(TESTS):
        if (
            path == TESTS / "support" / "servers" / "__init__.py"
        ):  # the one place, and CI fails there
            continue
        offences += [
            at(path, node, ast.unparse(node))
            for node in nodes(path)
            if isinstance(node, ast.Attribute) and node.attr in excuses
            # What a person decides about a step of a saga.
            if ast.unparse(node) != "sagas.skip"
        ]
    report(offences)


def test_every_promise_has_a_test_that_carries_its_id():
    carried: set[str] = set()
    for path in modules(TESTS):
        for node in nodes(path):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                text = f"{node.name.replace('_', ' ').upper()} {ast.get_docstring(node) or ''}"
                carried.update(re.findall(r"\b[A-Z]\d{1,2}\b", text))
    assert [promise for promise in PROMISES if promise not in carried] == []


# ----------------------------------------------------------------------------------- the frame


def test_no_file_knows_the_machine_it_was_written_on():
    places = re.compile(
        r"/(?:home|Users)/\w+|/root/|[A-Z]:\\\\?Users|(?:--|_)(?:extra-)?index-url"
        r"|find-links|/simple/|files\.pythonhosted|registry\.npmjs"
    )
    built = {"__pycache__", "build", "dist", "node_modules", "results"}
    offences = []
    ours = [path for path in ROOT.glob("*") if not path.name.startswith(".")]
    ours += [ROOT / ".ci", ROOT / ".pre-commit-config.yaml"]
    for path in sorted(inner for outer in ours for inner in (outer, *outer.rglob("*"))):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or built & set(parts) or path == Path(__file__).resolve():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        offences += [
            at(path, text.count("\n", 0, m.start()) + 1, m[0]) for m in places.finditer(text)
        ]
    report(offences)


def test_constraints_pin_every_package_by_name_and_version_only():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+", pin)] == []
    pinned = {canonical(pin.partition("==")[0]) for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for names in project["optional-dependencies"].values() for name in names]
    assert {canonical(re.split(r"[\[<>=]", name)[0]) for name in wanted} - pinned == {"coatcheck"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
