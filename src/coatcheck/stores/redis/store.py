"""The Redis store: Redis or Valkey; a single server, Sentinel or Cluster.

How durable an acknowledged write is depends on the server's settings. With an append-only file it
survives a crash, and a power cut except for the last second; with `appendfsync always` it survives
both. A replica that is promoted may miss the last writes; `wait=1` narrows that gap. The store
refuses a server that evicts records, keeps nothing on disk, or is a replica (`safety.py`).

A batch is one round trip: a script compares and writes (`swap.lua`), and returns records only for
conflicts. The server deletes records itself when they expire, so a sweep has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from coatcheck.core.flow import Effect, run
from coatcheck.core.record import Record, Swap
from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable
from coatcheck.stores.batch_errors import SkipUndecodable
from coatcheck.stores.contract import (
    SWEEP_BATCH,
    AsyncBackend,
    Finding,
    Page,
    Query,
    matching,
    page_of,
)
from coatcheck.stores.migration import Migration
from coatcheck.stores.record_counts import RecordCount, record_count_of
from coatcheck.stores.redis.async_backend import RedisBackend
from coatcheck.stores.redis.client import Server
from coatcheck.stores.redis.cluster import Cluster, Topology
from coatcheck.stores.redis.doctor import findings_by_trying
from coatcheck.stores.redis.errors import LoginRefused, Reply, raise_error
from coatcheck.stores.redis.records import READ_MAX, Commands, Keys, UnreadableValue
from coatcheck.stores.redis.safety import QUESTIONS, Health, SafetyMonitor
from coatcheck.stores.redis.swap import Flows, Send
from coatcheck.stores.redis.url import RedisConfig, parse_url
from coatcheck.stores.registry import REDIS

# 60 s: a check is three short commands, and a server evicts little in a minute.
RECHECK_EVERY_MS = 60_000
# 1000: one step of a scan takes the server less than a millisecond, and others run between.
_SCAN_COUNT = 1_000


class RedisStore:
    """Records in Redis, each under a key of its own."""

    info = REDIS

    def __init__(self, config: RedisConfig) -> None:
        self.name = str(config)
        self._config = config
        self._checked_ms: int | None = None  # when `now_ms` last checked for risks
        self._undecodable = SkipUndecodable()
        self._monitor = SafetyMonitor(config.allow, config.shape)
        self._topology: Topology
        if config.shape == "cluster":
            self._topology = Cluster(config, self._monitor)
        else:
            self._topology = Server(config, config.addresses[0], self.name, self._monitor)
        keys = Keys(config.prefix)
        self._commands = Commands(keys, is_cluster=self._topology.is_cluster)
        self._flows = Flows(self.name, self._commands, self._monitor, config.compact)
        try:
            for health in self._healths().values():
                if refusal := self._monitor.refusal_of(health):
                    raise Misconfigured(refusal)
        except LoginRefused as error:
            self.close()
            raise Misconfigured(f"{error}; check the user and password in the URL") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> RedisStore:
        """Open the store that *url* names; `url.py` has the forms and the options."""
        del create  # there is nothing to create: a prefix without records is an empty store
        return cls(parse_url(url))

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Create nothing, because nothing is needed; but raise if the servers are not usable."""
        del only_look
        store = cls.from_url(url)
        store.close()
        return Migration(store.name, 0, 0)

    def _healths(self) -> dict[str, Health]:
        """Ask every server about itself; return the answers by its name."""
        return {server.name: self._health(server) for server in self._topology.servers()}

    def _health(self, server: Server) -> Health:
        health = self._monitor.health_of(server.name, server.operators.send(QUESTIONS))
        if health.is_replica:  # it was the master when we connected; a new connection finds it
            server.operators.disconnect_idle()
            health = self._monitor.health_of(server.name, server.operators.send(QUESTIONS))
        return health

    def async_backend(self) -> AsyncBackend:
        """Return access for the running event loop, which uses a cluster through threads."""
        if self._topology.is_cluster:
            raise NotImplementedError
        return RedisBackend(self._config, self._flows)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        if self._monitor.refusal and self._topology.is_cluster:
            self._monitor.update(self._healths())
        return run(self._flows.swap(swaps), self._perform)

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Read the records with these *ids*, in their order."""
        return run(self._flows.get(ids), self._perform)

    def _perform(self, effect: Effect[list[Reply]]) -> list[Reply]:
        assert isinstance(effect, Send)
        send = self._topology.write if effect.is_write else self._topology.read
        return send(effect.commands)

    def find(self, query: Query) -> Page:
        """
        Read records for operators.

        Redis has no order, so all ids are collected first: a million of them take about 100 MB
        here and some seconds, during which the server serves others.
        """
        return page_of(matching(self._read_all(query.id_prefix, query.after_id), query), query)

    def count_records(self) -> Iterator[RecordCount]:
        """Count each record by itself, because Redis cannot group them."""
        return map(record_count_of, self._read_all())

    def _read_all(self, id_prefix: bytes = b"", after_id: bytes = b"") -> Iterator[Record]:
        """Yield all records in id order, read some at a time."""
        ids = sorted({id for id in self._scan(id_prefix) if id > after_id})
        try:
            for start in range(0, len(ids), READ_MAX):
                yield from self._undecodable.read(self.get, ids[start : start + READ_MAX])
        except UnreadableValue as error:
            raise StoreUnavailable(f"{self.name}: {error}") from error

    def _scan(self, id_prefix: bytes) -> Iterator[bytes]:
        """Yield every id that begins with *id_prefix*, some of them twice."""
        keys = self._commands.keys
        pattern = keys.pattern_of(id_prefix)
        for server in self._topology.servers():
            cursor = b"0"
            while True:
                reply = server.operators.ask("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                raise_error(self.name, reply)
                cursor, found = reply
                yield from (id for key in found if (id := keys.id_of(key)) is not None)
                if cursor == b"0":
                    break

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Delete nothing: the server deletes every record when it expires."""
        del now_ms, limit
        self._topology.check_open()
        return 0

    def check(self) -> Sequence[Finding]:
        """Report risks (allowed ones as warnings) and commands that do not work."""
        findings: list[Finding] = []
        try:
            for health in self._healths().values():
                findings += health.findings
                for risk in health.risks:
                    is_allowed = risk.name in self._monitor.allow
                    level: Literal["warning", "error"] = "warning" if is_allowed else "error"
                    findings.append(Finding(level, risk.message))
            findings += findings_by_trying(self.name, self._topology, self._commands)
        except CoatcheckError as error:
            findings.append(Finding("error", str(error)))
        return findings

    def now_ms(self) -> int:
        """
        Return the server's clock; in a cluster, that of one master.

        Engines call this from time to time, and not on the path of a request. So this is also
        where the store checks again whether the servers could lose records.
        """
        now_ms = self._time_ms()
        checked_ms = self._checked_ms
        if checked_ms is None:  # the store was checked when it was opened
            self._checked_ms = now_ms
        elif not 0 <= now_ms - checked_ms < RECHECK_EVERY_MS:
            self._checked_ms = now_ms
            self._monitor.update(self._healths())
        return now_ms

    def _time_ms(self) -> int:
        server = next(iter(self._topology.servers()))
        reply = server.operators.ask("TIME")
        raise_error(self.name, reply)
        seconds, microseconds = reply
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    def close(self) -> None:
        """Close all connections."""
        self._topology.close()
