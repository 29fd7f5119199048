"""The bell of the Redis store: publish and subscribe.

Beside `redis_places.py`. One connection subscribes; another publishes, because a connection that
has subscribed may say nothing else, and is opened when there is first something to say.

With Sentinels both go to the master. In a cluster both go to whichever of the named nodes answers:
what is published at one node is heard at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coatcheck.errors import StoreUnavailable
from coatcheck.stores.fork import renew_after_fork
from coatcheck.stores.redis_line import Connection, Line, connector, master_connector
from coatcheck.stores.redis_replies import Refusal, Reply
from coatcheck.stores.redis_url import Target
from coatcheck.stores.redis_values import packed


class RedisBell:
    """
    Everybody who has the same prefix of the same database.

    Args:
        target: which servers.
        prefix: what the store's keys begin with.
        timeout_s: how long connecting may take, and each answer.
    """

    def __init__(self, target: Target, prefix: str, timeout_s: float) -> None:
        # Channels know no databases, so the name says which one is meant.
        self._channel = f"{prefix}bell:{target.database}".encode()
        self._connect = _connector(target, timeout_s)
        self._mouth = Line(self._connect, target.name)
        self._ear: Connection | None = None
        self._inherited: list[Connection | None] = []
        self._heard: list[str] = []
        renew_after_fork(self)

    def _renew(self) -> None:
        """Begin anew in a child, which must neither use nor close what is the parent's."""
        self._inherited.append(self._ear)
        self._ear = None
        self._heard = []

    def open(self) -> bool:
        """Subscribe; whoever may not, is told so by the server."""
        self._ear = self._connect()
        self._ask_until(b"subscribe", b"SUBSCRIBE", self._channel)
        return True

    def fileno(self) -> int:
        """The subscription's; the driver has no other word for it."""
        number: int = self._ready()._sock.fileno()  # noqa: SLF001 - as above
        return number

    def ring(self, words: str) -> None:
        """Publish."""
        told = self._mouth.ask("PUBLISH", self._channel, words)
        if type(told) is Refusal:
            raise StoreUnavailable(f"{self._mouth.name}: {told}")

    def heard(self) -> Sequence[str]:
        """What has come, also while we asked for something else."""
        ear = self._ready()
        while ear.can_read():
            self._take(ear.read_response(disable_decoding=True))
        heard, self._heard = self._heard, []
        return heard

    def ping(self) -> None:
        """Whether the subscription is still there."""
        self._ask_until(b"pong", b"PING")

    def close(self) -> None:
        """Let go of both connections."""
        ear, self._ear = self._ear, None
        self._heard = []
        self._mouth.hang_up()
        if ear is not None:
            ear.disconnect()

    def _ask_until(self, answer: bytes, *words: bytes) -> None:
        """Ask, and take in what comes before the *answer*."""
        ear = self._ready()
        ear.send_packed_command([packed(*words)], check_health=False)
        while (told := ear.read_response(disable_decoding=True))[0] != answer:
            self._take(told)

    def _take(self, told: Reply) -> None:
        if told[0] == b"message":
            self._heard.append(told[2].decode("ascii", "replace"))

    def _ready(self) -> Connection:
        if self._ear is None:
            raise StoreUnavailable(f"{self._mouth.name}: the bell is not open")
        return self._ear


def _connector(target: Target, timeout_s: float) -> Callable[[], Connection]:
    """What connects to a server at which everybody is heard."""
    if target.shape == "sentinel":
        return master_connector(target, timeout_s)
    each = [connector(target, address, timeout_s) for address in target.addresses]

    def connect() -> Connection:
        for attempt in each[:-1]:
            try:
                return attempt()
            except Exception:  # noqa: BLE001, S112 - the driver's; the next one may answer
                continue
        return each[-1]()

    return connect
