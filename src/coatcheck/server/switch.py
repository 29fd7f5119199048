"""The kill switch: lets guarded requests pass as if they were not guarded, without a release.

`COATCHECK_DISABLED=1` in the environment switches a whole process off when it starts. `disabled_by`
of a middleware switches routes off and on while the process runs: a file with a label in each line,
or a function of a label. The label of a request is its method and the template of its route, or its
path where that is not known.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

from coatcheck.core.callables import check_function, refuse_awaitable
from coatcheck.core.policy import Policy
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.periodic import AtMostEvery
from coatcheck.errors import Misconfigured
from coatcheck.server.observe import unclaimed_operation
from coatcheck.server.routes import RoutePolicies, Unclaimed
from coatcheck.server.routes import found as note_found

logger = logging.getLogger("coatcheck")

# What `disabled_by=` takes: the path of a file, or a function of a label.
DisabledBy: TypeAlias = str | os.PathLike[str] | Callable[[str], bool]

VARIABLE = "COATCHECK_DISABLED"
_VALUES = {"": False, "0": False, "false": False, "1": True, "true": True}

# A change of the file is noticed after a second at most; until then no call of the system is made.
LOOK_EVERY_S = 1.0
# A function that fails is logged this often.
LOG_EVERY_S = 10.0
# As many labels as an API has routes. A path that matches no route may be anything.
LABELS_MAX = 1_000


def is_process_disabled(environ: Mapping[str, str] = os.environ) -> bool:
    """The environment switches this process off."""
    value = environ.get(VARIABLE, "")
    is_disabled = _VALUES.get(value.strip().lower())
    if is_disabled is None:
        raise Misconfigured(f"{VARIABLE} is {value!r}; write 1 to disable coatcheck, or 0")
    if is_disabled:
        logger.warning("coatcheck: disabled by %s: nothing is guarded", VARIABLE)
    return is_disabled


def switched(
    routes: RoutePolicies,
    disabled_by: DisabledBy | None,
    attempts: Attempts,
    *,
    is_process_disabled: bool,
) -> RoutePolicies:
    """*routes* behind the kill switch; *routes* itself if there is none."""
    if is_process_disabled:
        return _SwitchedRoutes(routes, _everything, attempts)
    if disabled_by is None:
        return routes
    if isinstance(disabled_by, (str, os.PathLike)):
        return _SwitchedRoutes(routes, DisabledFile(Path(disabled_by)).is_disabled, attempts)
    check_function("disabled_by", disabled_by)
    return _SwitchedRoutes(routes, _DisabledFunction(disabled_by).is_disabled, attempts)


def _everything(_label: str) -> bool:
    return True


class _SwitchedRoutes:
    """Finds no policy for a request that is switched off."""

    def __init__(
        self, routes: RoutePolicies, is_disabled: Callable[[str], bool], attempts: Attempts
    ) -> None:
        self._routes = routes
        self._is_disabled = is_disabled
        self._attempts = attempts

    def lookup(
        self, native: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """As `RoutePolicies.lookup`."""
        try:
            policy, template = self._routes.lookup(native, method)
        except Misconfigured:  # a mark contradicts the middleware's policy
            if self._is_disabled is not _everything:
                raise
            policy, template = Policy(), None
        if policy is None:
            return None, None
        label = f"{method} {_path_of(native) if template is None else template}"
        if not self._is_disabled(label):
            return policy, template
        note_found(Unclaimed(lambda: unclaimed_operation(self._attempts, label, policy)))
        return None, None

    def let_pass(self, native: MutableMapping[str, Any]) -> None:
        """As `RoutePolicies.let_pass`."""
        self._routes.let_pass(native)


def _path_of(native: MutableMapping[str, Any]) -> str:
    if "path" in native:  # ASGI
        return str(native["path"])
    path: str = native.get("SCRIPT_NAME", "") + native.get("PATH_INFO", "")
    return path.encode("latin-1", "replace").decode("utf-8", "replace")


class DisabledFile:
    """
    The labels in a file; without the file nothing is disabled.

    Each line is a label, the beginning of labels and `*`, or `*` for everything. Empty lines, and
    lines that begin with `#`, are left out.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._look = AtMostEvery(LOOK_EVERY_S, clock)
        self._seen: object = None  # what the file looked like when it was read
        self._labels: frozenset[str] = frozenset()
        self._prefixes: tuple[str, ...] = ()

    def is_disabled(self, label: str) -> bool:
        """A line of the file names *label*."""
        if self._look.is_due():
            self._read_if_changed()
        return label in self._labels or label.startswith(self._prefixes)

    def _read_if_changed(self) -> None:
        try:
            stat = self._path.stat()
            seen: object = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            text = self._path.read_text("utf-8") if seen != self._seen else None
        except FileNotFoundError:
            seen, text = None, ""
        except (OSError, ValueError) as error:  # then everything stays as it was
            if str(error) != self._seen:
                logger.error("coatcheck: %s cannot be read: %s", self._path, error)  # noqa: TRY400 - its trace says nothing more
            seen, text = str(error), None
        self._seen = seen
        if text is not None:
            self._set([line.strip() for line in text.splitlines()])

    def _set(self, lines: list[str]) -> None:
        named = [line for line in lines if line and not line.startswith("#")]
        labels = frozenset(line for line in named if not line.endswith("*"))
        prefixes = tuple(sorted(line[:-1] for line in named if line.endswith("*")))
        if (labels, prefixes) == (self._labels, self._prefixes):
            return
        self._labels, self._prefixes = labels, prefixes
        if named:
            logger.warning("coatcheck: disabled by %s: %s", self._path, ", ".join(named))
        else:
            logger.warning("coatcheck: %s disables nothing any more", self._path)


class _DisabledFunction:
    """What a function of the application says; if it fails, the request stays guarded."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self._function = function
        self._disabled: set[str] = set()
        self._log_failure = AtMostEvery(LOG_EVERY_S)

    def is_disabled(self, label: str) -> bool:
        """The function returns something true for *label*."""
        try:
            found = self._function(label)
            refuse_awaitable("disabled_by", found)  # a coroutine would count as True
            is_disabled = bool(found)
        except Exception:
            if self._log_failure.is_due():
                logger.exception("coatcheck: disabled_by= failed, so %s stays guarded", label)
            return False
        if is_disabled and label not in self._disabled and len(self._disabled) < LABELS_MAX:
            self._disabled.add(label)
            logger.warning("coatcheck: disabled by a function: %s", label)
        elif not is_disabled and label in self._disabled:
            self._disabled.discard(label)
            logger.warning("coatcheck: guarded again: %s", label)
        return is_disabled
