"""URLs of all stores: what cannot be meant is refused with a sentence, and no password is told."""

import traceback

import pytest

from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable
from coatcheck.stores import migrate_store, open_lazily, open_store, registry
from coatcheck.stores.url import shown

OPENERS = [open_store, migrate_store]
# The last letter but one stands for two others, one of them a stroke.
MARKS = ("[", "]", "/", "?", "%", "@", "#", ":", "&", "=", "℀", "")
PASSWORDS = [f"Kq7Zw{mark}9xVbT" for mark in MARKS]
PLACES = [
    "postgresql://ann:{}@127.0.0.1:1/db?timeout=1s",
    "postgresql://ann:{}@127.0.0.1:99999/db",
    "postgresql://ann:{}@127.0.0.1/db?nonsense=1",
    "mysql://ann:{}@127.0.0.1:1/db?timeout=1s",
    "mysql://ann:{}@127.0.0.1/db?nonsense=1",
    "redis://ann:{}@127.0.0.1:1/0?timeout=1s",
    "redis://:{}@127.0.0.1:port/0",
    "redis://:{}@127.0.0.1/orders?nonsense=1",
    "redis+sentinel://:{}@127.0.0.1:1/s?timeout=1s",
    "redis+sentinel://:{}@127.0.0.1:1/",
    "redis+cluster://:{}@127.0.0.1:1/3?timeout=1s",
    "dynamodb://ann:{}@table?region=eu-west-1",
    "sqlite://ann:{}@host/x.db",
    "memory://ann:{}@x",
    "nonsense://ann:{}@host/x",
    "//ann:{}@host/x",
    "ann:{}@host/x",
]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("place", PLACES)
def test_no_message_tells_a_piece_of_a_password(opener, place, password):
    """X1, D1: however it is misspelt, also in what is printed of where the error came from."""
    with pytest.raises(CoatcheckError) as caught:
        opener(place.format(password))
    messages = traceback.format_exception(caught.value)
    told = "\n".join(line for text in messages for line in text.splitlines() if line[:1] != " ")
    pieces = [password[start : start + 5] for start in range(len(password) - 4)]
    assert [piece for piece in pieces if piece in told] == []


def test_a_part_of_a_password_that_is_taken_for_something_else_is_not_told():
    """X1: such as a host, or an option, however short it is."""
    for url in (
        "redis://:SEC?RET@127.0.0.1:6379/0",
        "postgresql://ann:SEC?RET@127.0.0.1/db",
        "postgresql://ann:SEC@RET@127.0.0.1:1/db",
        "mysql://ann:SEC?RET@host/db",
    ):
        with pytest.raises(CoatcheckError, match="write '@' as %40") as caught:
            open_store(url)
        assert "RET" not in str(caught.value)


def test_a_password_that_is_spelt_well_costs_nobody_a_message():
    """D1: what is wrong is said, also where a word of it is the password."""
    with pytest.raises(Misconfigured, match="nonsense"):
        open_store("mysql://mysql:mysql@127.0.0.1/mysql?nonsense=1")
    with pytest.raises(CoatcheckError) as caught:
        open_store("postgresql://postgres:postgres@127.0.0.1:1/postgres?timeout=1s")
    assert "%40" not in str(caught.value)


def test_a_url_is_shown_without_login_and_options():
    """X1."""
    for url, text in {
        "postgresql://ann:p@ss/w?rd@host:5432/db?password=x": "postgresql://…@host:5432/db",
        "redis://host:6379/0?sentinel_password=x": "redis://host:6379/0",
        "sqlite:////var/x.db": "sqlite:////var/x.db",
        "ann:secret@host/db": "…@host/db",
        "ann:secret@host://x": "…@host://x",
        "nothing": "nothing",
    }.items():
        assert shown(url) == text


def test_what_an_option_says_that_nobody_knows_is_not_told():
    """X1: it may be a password, under a name that another driver has for it."""
    for url in (
        "mysql://host/db?password=Kq7Zw9xVbT",
        "redis://host/0?password=Kq7Zw9xVbT",
        "redis+sentinel://host/s/0?sentinel_pass=Kq7Zw9xVbT",
        "dynamodb://abc?aws_secret_access_key=Kq7Zw9xVbT",
        "sqlite:///x.db?key=Kq7Zw9xVbT",
        "postgresql://host/db?pass=Kq7Zw9xVbT",
    ):
        with pytest.raises(Misconfigured) as caught:
            open_store(url)
        assert "Kq7Zw" not in "".join(traceback.format_exception(caught.value))


def test_a_port_that_is_none_is_not_told():
    """X1: it may be a password whose host was forgotten."""
    for url in ("redis://:Kq7Zw9xVbT/0", "redis://h:Kq7Zw9xVbT/0"):
        with pytest.raises(Misconfigured, match="is not host:port") as caught:
            open_store(url)
        assert "Kq7Zw" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("dynamodb://abc?region=eu-west-1&endpoint=http://127.0.0.1:99999", "endpoint="),
        ("dynamodb://abc?region=eu-west-1&endpoint=http://[::1", "endpoint="),
        ("dynamodb://abc?region=eu-west-1&timeout=99999999999d", "timeout.* longer than a day"),
        ("redis://127.0.0.1:1/0?timeout=99999999999d", "timeout.* longer than a day"),
        (f"redis://127.0.0.1:1/0?timeout={'9' * 400}d", "timeout"),
        ("redis://127.0.0.1:1/0?timeout=25h", "timeout.* longer than a day"),
        ("mysql://h/db?timeout=99999999999d", "timeout.* longer than a day"),
        ("postgresql://h/db?timeout=99999999999d", "timeout.* longer than a day"),
        ("postgresql://h/db?timeout=0s", "timeout=0s: a timeout must be longer than 0"),
        ("sqlite:///x.db?busy_timeout=99999999999d", "busy_timeout.* longer than a day"),
        ("redis://a?compact=yes", "compact=yes: write 0 or 1"),
        ("redis://a?timeout=soon", "timeout=soon: 'soon' is not a duration"),
        (
            "redis://a?compakt=1",
            r"compakt=… is no option \(did you mean compact\?\); the .* prefix=",
        ),
        ("sqlite:///x.db?busy_timeout=soon", "busy_timeout=soon: 'soon' is not .* compact=0 or 1"),
        ("mysql://h/db?compact=2", "compact=2: write 0 or 1; the options are table="),
        ("mysql://h/db?transaction_timeout=0s", "transaction_timeout=0s: a timeout must be longer"),
        ("mysql://h/db?table=a`b", "letters, digits and '_'"),
        ("mysql://h/db?table=coatcheck_meta", "cannot be the name"),
        ("mysql://h/db?ssl_ca=/nowhere.pem", "ssl_ca=/nowhere.pem is not a readable"),
        ("mysql://shop", "must be mysql://user"),
        ("mysql:///shop", "must be mysql://user"),
        ("mysql://h/shop/orders", "must be mysql://user"),
        ("mysql://ann:s3#cret@h/shop", "'#' as %23"),
        ("mysql://h:many/shop", "must be mysql://user"),
        ("redis://a,b/0", "names one server"),
        ("redis://a:port/0", "is not host:port"),
        ("redis://a/orders", "is not understood; write redis://host:6379/0"),
        ("redis://a/0/1", "is not understood"),
        ("redis://a/0#1", "is not understood"),
        ("redis+sentinel://a:26379", r"redis\+sentinel://host1:26379,host2:26379/service/0"),
        ("redis+cluster://a/3", "a cluster has only database 0"),
        ("redis://a?sentinel_password=x", r"sentinel_password= is for redis\+sentinel://"),
        ("redis+cluster://a?sentinel_username=x", r"sentinel_username= is for redis\+sentinel://"),
        ("redis://a?prefix={x}", r"prefix=coatcheck: \(of all keys, without braces\)"),
        ("redis://a?wait=-1", "wait=-1: not a number of replicas"),
        ("redis://a?allow=everything", "eviction, no-persistence, replica"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///orders#1.db", "%23"),
        *(
            (f"dynamodb://{rest}", "dynamodb://.* names no table")
            for rest in ("", "/orders", "a/b", "ab", "a b c", "orders#x")
        ),
        ("dynamodb://orders?concurrency=0", "concurrency=0: .* not a number from 1 to 999"),
        ("dynamodb://orders?concurrency=many", "concurrency=many: .* not a number"),
        ("dynamodb://orders?region=", "region=: the region is empty"),
        ("dynamodb://orders?endpoint=localhost:8000", "endpoint=localhost:8000: .* not a URL"),
        ("dynamodb://orders?endpoint=http://", "endpoint=http://: .* not a URL"),
        ("redis://a..b/0", "a..b/0 cannot be opened"),
        (f"redis://{'a' * 70}/0", "cannot be opened"),
        (f"redis://h/0?wait={'9' * 5_000}", "wait=9{40}: not a number of replicas"),
        ("mysql://h/db?ssl_ca=%00", "cannot be opened"),
        ("postgresql://ann:\ud800@h/db", "…@h/db cannot be opened"),
        ("sqlite:///a%00b", "names no file"),
        ("sqlite://orders.db", r"did you mean sqlite:///orders.db\?"),
        ("sqlite://var/orders.db?create=1", r"did you mean sqlite:///var/orders.db\?"),
        ("postgress://h/db", r"did you mean postgres://\?"),
        ("mysqll://h/db", r"did you mean mysql://\?"),
        ("redis+sentinal://h/s", r"did you mean redis\+sentinel://\?"),
        ("dynamo://orders", r"did you mean dynamodb://\?"),
        ("postgresql://h/db?schema=", "schema=: name a schema"),
        ("sqlite:////tmp/\ud800.db", "names no file"),
        ("memory://x", "takes no name and no options"),
        ("memory://?a=b", "takes no name and no options"),
        (5, "named by a URL"),
        (None, "named by a URL"),
        (b"sqlite:///x.db", "named by a URL"),
    ],
)
def test_what_cannot_be_opened_is_a_sentence_and_no_traceback(
    opener, url, said, tmp_path, monkeypatch
):
    """D1: and nothing is created."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Misconfigured, match=said):
        opener(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://postgres@127.0.0.1:1/postgres",
        "mysql://root@127.0.0.1:1/shop",
        "mysql://root@no-such-host.invalid/shop",
        "redis://127.0.0.1:1/0",
        "redis+cluster://127.0.0.1:1",
        "redis+sentinel://127.0.0.1:1/records",
        "dynamodb://orders?region=eu-west-1&endpoint=http://127.0.0.1:1",
    ],
)
def test_a_server_that_cannot_be_reached_is_an_outage(url):
    """D2: it may come back, and nothing was written."""
    with pytest.raises(StoreUnavailable) as caught:
        open_store(f"{url}{'&' if '?' in url else '?'}timeout=1s")
    assert not caught.value.is_ambiguous


@pytest.mark.parametrize(
    ("urls", "info"),
    [
        (("sqlite:///path.db", "sqlite:////path.db"), registry.SQLITE),
        (("postgresql://h/d", "postgres://h/d"), registry.POSTGRES),
        (("postgresql+psycopg://h/d", "postgresql+asyncpg://h/d"), registry.POSTGRES),
        (("mysql://h/d", "mysql+pymysql://h/d", "mariadb://h/d"), registry.MYSQL),
        (("redis://h", "rediss://h", "redis+sentinel://h/s", "redis+cluster://h"), registry.REDIS),
        (("dynamodb://table?region=eu-west-1&endpoint=http://127.0.0.1:1",), registry.DYNAMODB),
    ],
)
def test_every_scheme_names_its_store(urls, info):
    """D1: the aliases of other libraries too; nothing is connected yet."""
    for url in urls:
        open_lazily(url).close()
        assert registry.info_of(url) is info


def test_memory_is_opened_under_its_name_alone():
    """D1: also where it is said that it may be made."""
    for url in ("memory://", "memory:", "memory://?create=1"):
        open_store(url).close()
