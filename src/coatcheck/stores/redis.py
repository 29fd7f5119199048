"""The Redis store: for those who have one already. Redis or Valkey; single, Sentinel or Cluster.

What a swap has acknowledged survives what the server's own settings make it survive: with an
append-only file a crash, and a power cut but for its last second; with `appendfsync always` both,
on a busy disk, too. A replica that is promoted may not have the last writes; who cannot have that
asks for `wait=1`. A server that throws records away when memory is short, or keeps nothing on disk,
or is a replica, is refused.

A batch is one round trip: a script compares and writes, and answers only for those who lost (see
`redis_values.py`). Threads ask through a place (`redis_places.py`), event loops through a wire
(`redis_wire.py`); what they ask and what they are told is one thing (`redis_flow.py`). Records are
forgotten by the server itself, so a sweep has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from coatcheck.core.flow import Effect, run
from coatcheck.core.record import Record, Swap
from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable
from coatcheck.stores import redis_values as values
from coatcheck.stores.contract import SWEEP_BATCH, Bell, Finding, Page, Query, Wire, matches
from coatcheck.stores.declared import REDIS
from coatcheck.stores.migration import Migration
from coatcheck.stores.redis_bell import RedisBell
from coatcheck.stores.redis_cluster import Cluster
from coatcheck.stores.redis_dangers import QUESTIONS, Health, Watch
from coatcheck.stores.redis_doctor import findings_by_trying
from coatcheck.stores.redis_flow import Flows, Send, Wait, refuse_refusal
from coatcheck.stores.redis_line import Denied, Line, connector, master_connector
from coatcheck.stores.redis_places import Place, Single
from coatcheck.stores.redis_replies import Reply
from coatcheck.stores.redis_url import Target, target_and_options
from coatcheck.stores.unread import LeftOut

PREFIX = "coatcheck:"
# 5 s: thousands of times what an answer takes. Who has waited that long is better told so.
TIMEOUT_S = 5.0
# 60 s: a look is three short commands, and what is evicted in a minute is little.
RECHECK_EVERY_MS = 60_000
# 1000: a page of a search takes the server less than a millisecond, between those of others.
_SCAN_COUNT = 1_000


class RedisStore:
    """
    Records in Redis, each under a key of its own.

    Args:
        target: which servers; see `from_url`.
        prefix: what all keys begin with; stores with different prefixes do not see each other.
        compact: keep only digests; label, scope and key are stored empty.
        timeout_s: how long to wait for a connection, and for each answer.
        wait: how many replicas must have a write before it counts.
        allow: the dangers that are known and wanted: eviction, no-persistence, replica.
    """

    declared = REDIS

    def __init__(
        self,
        target: Target,
        *,
        prefix: str = PREFIX,
        compact: bool = False,
        timeout_s: float = TIMEOUT_S,
        wait: int = 0,
        allow: frozenset[str] = frozenset(),
    ) -> None:
        self.name = target.name
        self._allow = allow
        self._looked_ms: int | None = None
        self._left_out = LeftOut()
        self._keys = values.Keys(prefix)
        self._watch = Watch(allow, target.shape)
        self._place = _place(target, Wait(wait, timeout_s), self._watch)
        packer = values.Packer(self._keys, compact=compact, is_spread=self._place.is_spread)
        self._flows = Flows(self.name, packer, self._watch)
        self._new_bell = partial(RedisBell, target, prefix, timeout_s)
        try:
            self._refuse_dangers()
        except Denied as error:
            self.close()
            raise Misconfigured(f"{error}; the URL's user and password do not fit") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_url(cls, url: str, *, create: bool = True) -> RedisStore:
        """
        The store that *url* names.

        `redis://host:6379/0`, `rediss://…` (TLS), `redis+sentinel://host1:26379,host2/service/0`,
        `redis+cluster://host1:6379,host2`; each with `user:password@` before the hosts.
        Options: `?prefix=coatcheck:`, `?compact=1`, `?timeout=5s`, `?wait=1`, `?tls=1`,
        `?tls_ca=/path`, `?sentinel_username=…`, `?sentinel_password=…`,
        `?allow=eviction,no-persistence,replica`.
        """
        del create  # there is nothing to create: a prefix without records is an empty store
        target, options = target_and_options(url)
        return cls(target, **options)

    @classmethod
    def migrate(cls, url: str, *, only_look: bool = False) -> Migration:
        """Nothing is to be made; but whether the servers will do is looked at."""
        del only_look
        store = cls.from_url(url)
        store.close()
        return Migration(store.name, 0, 0)

    def _refuse_dangers(self) -> None:
        """Refuse a server that could forget, unless somebody has said that it may."""
        for health in self._healths().values():
            if refusal := self._watch.refusal_of(health):
                raise Misconfigured(refusal)

    def _healths(self) -> dict[str, Health]:
        """What every server says of itself, by name."""
        return {server.name: self._health(server) for server in self._place.servers()}

    def _health(self, server: Line) -> Health:
        health = self._watch.health_of(server.name, server.ask_all(QUESTIONS))
        if health.is_replica:  # it was the master when we have connected: who is by now?
            server.hang_up()
            health = self._watch.health_of(server.name, server.ask_all(QUESTIONS))
        return health

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if the version its caller saw still stands."""
        if self._watch.refused and self._place.is_spread:
            self._watch.learn(self._healths())
        return run(self._flows.swap(swaps), self._write)

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """The records that stand, in the order of *ids*."""
        return run(self._flows.get(ids), self._read)

    def _write(self, effect: Effect[list[Reply]]) -> list[Reply]:
        assert isinstance(effect, Send)
        return self._place.write(effect.commands)

    def _read(self, effect: Effect[list[Reply]]) -> list[Reply]:
        assert isinstance(effect, Send)
        return self._place.read(effect.commands)

    def find(self, query: Query) -> Page:
        """
        Records for operators, in id order.

        Redis knows no order, so all ids are collected first: a million of them take about 100 MB
        here and some seconds, in which the server goes on to serve others.
        """
        records: list[Record] = []
        ids = sorted({id for id in self._scanned(query.id_prefix) if id > query.after_id})
        try:
            for start in range(0, len(ids), values.READ_MAX):
                some = self._left_out.read(self.get, ids[start : start + values.READ_MAX])
                records += [record for record in some if matches(record, query)]
                if len(records) > query.limit:
                    return Page(records[: query.limit], records[query.limit - 1].id)
        except values.UnreadableValue as error:
            raise StoreUnavailable(f"{self.name}: {error}") from error
        return Page(records, None)

    def _scanned(self, id_prefix: bytes) -> Iterator[bytes]:
        """Every id that begins with *id_prefix*, some of them twice."""
        pattern = self._keys.pattern_of(id_prefix)
        for server in self._place.servers():
            cursor = b"0"
            while True:
                told = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                refuse_refusal(self.name, told)
                cursor, keys = told
                yield from (id for key in keys if (id := self._keys.id_of(key)) is not None)
                if cursor == b"0":
                    break

    def sweep(self, now_ms: int, limit: int = SWEEP_BATCH) -> int:
        """Nothing: the server itself forgets every record when its time has come."""
        del now_ms, limit
        self._place.refuse_if_closed()
        return 0

    def check(self) -> Sequence[Finding]:
        """Whether the servers can forget, and do what is asked; what was allowed is warned of."""
        findings: list[Finding] = []
        try:
            for health in self._healths().values():
                findings += health.findings
                for danger in health.dangers:
                    level: Literal["warning", "error"] = (
                        "warning" if danger.name in self._allow else "error"
                    )
                    findings.append(Finding(level, danger.message))
            parts = (self._place, self._keys, self._flows.packer, self.bell())
            findings += findings_by_trying(self.name, *parts)
        except CoatcheckError as error:
            findings.append(Finding("error", str(error)))
        return findings

    def now_ms(self) -> int:
        """
        The server's clock; of a cluster, that of one of its masters.

        Who asks does so from time to time, and not on the path of a request: so this is also
        where the servers are asked again whether they could forget.
        """
        now_ms = self._time_ms()
        looked_ms = self._looked_ms
        if looked_ms is None:  # it was looked at when it was opened
            self._looked_ms = now_ms
        elif not 0 <= now_ms - looked_ms < RECHECK_EVERY_MS:
            self._looked_ms = now_ms
            self._watch.learn(self._healths())
        return now_ms

    def _time_ms(self) -> int:
        server = next(iter(self._place.servers()))
        told = server.ask("TIME")
        refuse_refusal(self.name, told)
        seconds, microseconds = told
        return int(seconds) * 1_000 + int(microseconds) // 1_000

    def bell(self) -> Bell:
        """A connection that subscribes; and one that publishes, where there is something to say."""
        return self._new_bell()

    def wire(self) -> Wire:
        """Connections of the running event loop's own; a cluster is asked by a thread."""
        return self._place.wire(self._flows)

    def close(self) -> None:
        """Let go of all connections."""
        self._place.close()


def _place(target: Target, wait: Wait, watch: Watch) -> Place:
    """The servers that *target* names."""
    if target.shape == "cluster":
        return Cluster(target, wait, watch)
    if target.shape == "sentinel":
        connect = master_connector(target, wait.timeout_s)
    else:
        connect = connector(target, target.addresses[0], wait.timeout_s)
    return Single(connect, target.name, wait, watch)
