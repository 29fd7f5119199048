"""Django: settings, marks, callers, the current operation, bodies and responses."""

import asyncio
import json
import sqlite3
from contextlib import closing

import pytest

from tests.support import django_project

django_project.set_up()

from django.contrib.auth.models import User  # noqa: E402 - settings come first
from django.core.checks import run_checks  # noqa: E402
from django.core.files.uploadedfile import SimpleUploadedFile  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.test import AsyncClient, Client, override_settings  # noqa: E402
from rest_framework.authtoken.models import Token  # noqa: E402
from rest_framework.test import APIClient  # noqa: E402

from coatcheck import Happened, Policy  # noqa: E402
from coatcheck.errors import Misconfigured  # noqa: E402
from coatcheck.server.django import get_engine  # noqa: E402
from coatcheck.server.django.site import current_site  # noqa: E402
from coatcheck.stores import Query  # noqa: E402
from tests.server import django_shop  # noqa: E402
from tests.support.times import WAIT_S_MAX, eventually  # noqa: E402

OURS = "coatcheck.server.django.IdempotencyMiddleware"


class Sender:
    """Posts with Django's test client, sync or async."""

    def __init__(self, is_async=False):
        self.is_async = is_async
        self.client = (AsyncClient if is_async else Client)(raise_request_exception=False)

    def post(self, path, key="k-1", body=None, method="post", **headers):
        if key is not None:
            headers["Idempotency-Key"] = key
        send = getattr(self.client, method)
        body = {"item": "coat"} if body is None else body
        sent = send(path, body, content_type="application/json", headers=headers)
        return asyncio.run(_whole(sent)) if self.is_async else sent


async def _whole(sent):
    """The response, with its stream read on the event loop that it belongs to."""
    response = await sent
    if response.streaming:
        response.read = b"".join([chunk async for chunk in response])
    return response


@pytest.fixture
def project():
    """Configures a project: `project(policy=…)`, on a store in memory."""
    after = []

    def configure(store="memory://", settings=None, **coatcheck):
        changed = override_settings(
            ROOT_URLCONF="tests.server.django_shop",
            COATCHECK={"store": store, **coatcheck},
            **(settings or {}),
        )
        changed.enable()
        after.append(changed)
        django_shop.CALLS.clear()

    yield configure
    for changed in reversed(after):
        changed.disable()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def sender(request, project):
    project()
    return Sender(request.param)


@pytest.fixture(scope="module")
def migrated():
    call_command("migrate", verbosity=0)


def is_replay(response) -> bool:
    return "Idempotent-Replayed" in response.headers


def code_of(response) -> str:
    assert response.headers["Content-Type"] == "application/problem+json", response.content
    return json.loads(response.content)["code"]


# --- the first and the second request --------------------------------------------------------


def test_a_retry_gets_the_response_and_no_view_runs(sender):
    """L2, K5: in both flavours; the operation is `request.coatcheck`."""
    first, second = sender.post("/plain"), sender.post("/plain")
    assert (first.status_code, second.status_code) == (201, 201)
    assert [is_replay(first), is_replay(second)] == [False, True]
    assert second.content == first.content
    assert json.loads(first.content)["reference"] == first.headers["Idempotency-Reference"]
    assert len(django_shop.CALLS) == 1
    other = sender.post("/plain", body={"item": "hat"})
    assert (other.status_code, code_of(other)) == (422, "key-reused")


def test_a_request_that_is_not_guarded_passes_and_has_no_operation(sender):
    """S3: without a key, or with a safe method."""
    assert json.loads(sender.post("/plain", key=None).content)["reference"] is None
    assert json.loads(sender.post("/plain", method="get").content)["reference"] is None
    assert len(django_shop.CALLS) == 2


MARKED = [
    *("/function", "/coroutine", "/on-class", "/on-method", "/on-async-method", "/on-dispatch"),
    *("/decorated-method", "/under-api-view", "/over-api-view", "/orders/", "/orders/7/pay/"),
    *("/orders/7/ship/", "/marked/", "/marked/7/pay/", "/decorated/"),
]


@pytest.mark.parametrize("path", MARKED)
def test_a_mark_is_found_before_the_view_runs(sender, path):
    """S3, K3: on functions, classes, their methods, view sets and their actions."""
    without = sender.post(path, key=None)
    assert (without.status_code, code_of(without)) == (400, "key-missing")
    assert not django_shop.CALLS
    first, second = sender.post(path), sender.post(path)
    assert (first.status_code, second.status_code) == (201, 201), first.content
    assert [is_replay(first), is_replay(second)] == [False, True]
    assert len(django_shop.CALLS) == 1


def test_a_mark_on_a_method_is_for_that_method_only(sender):
    """S3: PUT is not guarded by default."""
    answers = [sender.post("/on-method", method="put") for _ in range(2)]
    assert [is_replay(answer) for answer in answers] == [False, False]
    answers = [sender.post("/orders/7/", method="put") for _ in range(2)]
    assert [is_replay(answer) for answer in answers] == [False, False]


def test_the_label_of_a_marked_view_is_its_template(project):
    project()
    sender = Sender()
    reference = sender.post("/orders/7/pay/").headers["Idempotency-Reference"]
    (record,) = get_engine().store.find(Query()).records
    assert record.label.startswith("POST /^orders/(?P<pk>")
    assert reference


def test_the_policy_of_the_project_may_be_a_dictionary_or_a_preset(project):
    project(policy={"required": True})
    assert code_of(Sender().post("/plain", key=None)) == "key-missing"
    project(policy="payments")
    assert get_engine().policy == Policy.preset("payments")


def test_a_marked_view_without_the_middleware_refuses_to_run(project):
    project(settings={"MIDDLEWARE": []})
    client = Client()
    with pytest.raises(Misconfigured, match="in Django the MIDDLEWARE setting"):
        client.post("/function", {}, content_type="application/json")


@pytest.mark.parametrize("key", [{}, {"HTTP_IDEMPOTENCY_KEY": "k-1"}], ids=["no key", "key"])
def test_a_content_length_that_is_no_number_is_no_error_of_ours(project, key):
    """Django takes such a body for empty."""
    project()
    response = Client().generic(
        "POST", "/plain", b"", content_type="text/plain", CONTENT_LENGTH="many", **key
    )
    assert response.status_code < 500


# --- errors and refusals ----------------------------------------------------------------------


def test_a_view_that_raises_gives_the_key_back_and_django_makes_the_response(sender):
    """L4: with the exception at hand, not only its status."""
    first, second = sender.post("/fails"), sender.post("/fails")
    assert (first.status_code, second.status_code) == (500, 500)
    assert first.headers["Content-Type"].startswith("text/html")
    assert len(django_shop.CALLS) == 2


@pytest.mark.parametrize("path", ["/fails", "/refusing?fail=1"])
def test_a_view_that_raises_under_a_manual_policy_is_in_doubt(project, path):
    """L6: Django answers the first request, and no retry runs."""
    project(policy=Policy(recovery="manual"))
    for is_async in (False, True):
        first, second = (Sender(is_async).post(path, f"k-{is_async}") for _ in range(2))
        assert first.status_code == 500
        assert (second.status_code, code_of(second)) == (409, "outcome-unknown")
    assert len(django_shop.CALLS) == 2


def test_an_exception_of_drf_counts_as_its_status(sender):
    """L4: a 402 is final, and DRF writes it."""
    first, second = sender.post("/refusing"), sender.post("/refusing")
    assert (first.status_code, second.status_code) == (402, 402)
    assert json.loads(first.content) == {"detail": "A server error occurred."}
    assert [is_replay(first), is_replay(second)] == [False, True]
    assert len(django_shop.CALLS) == 1


def test_a_validation_error_of_a_view_is_kept_but_a_parse_error_before_it_is_not(sender):
    """L4: the view set has begun when its serializer refuses, and not when DRF cannot parse."""
    broken = sender.post("/orders/", key="k-1", body="{")
    assert broken.status_code == 400
    began = len(django_shop.CALLS)
    long = [sender.post("/orders/", key="k-2", body={"item": "a" * 11}) for _ in range(2)]
    assert [answer.status_code for answer in long] == [400, 400]
    assert [is_replay(answer) for answer in long] == [False, True]
    assert len(django_shop.CALLS) == began + 1


def test_a_refusal_before_the_view_began_does_not_use_up_the_key(sender, migrated):
    """L4: the second request has another body, which a used key would refuse."""
    assert sender.post("/on-method", key="k-1", method="patch").status_code == 405
    assert sender.post("/restricted", key="k-1").status_code == 401
    assert sender.post("/restricted", key="k-1", body={"item": "hat"}).status_code == 401


def test_a_refusal_of_drf_before_a_view_of_a_marked_class_does_not_use_up_the_key(sender):
    """L4: DRF cannot answer in XML; what the view itself refuses is an answer."""
    refused = sender.post("/marked/", key="k-1", Accept="application/xml")
    assert (refused.status_code, len(django_shop.CALLS)) == (406, 0)
    assert sender.post("/marked/", key="k-1", body={"item": "hat"}).status_code == 201
    long = [sender.post("/marked/", key="k-2", body={"item": "a" * 11}) for _ in range(2)]
    assert [answer.status_code for answer in long] == [400, 400]
    assert [is_replay(answer) for answer in long] == [False, True]
    assert len(django_shop.CALLS) == 2


def test_a_path_that_no_view_has_is_answered_by_django(sender):
    assert sender.post("/nowhere").status_code == 404


# --- callers ----------------------------------------------------------------------------------


@pytest.fixture
def users(migrated):
    users = [User.objects.create(username=name) for name in ("ada", "bob")]
    yield users
    for user in users:
        user.delete()


def test_the_user_of_the_session_is_the_caller(project, users):
    """S1, S2: two users share a key, and neither sees the other's response."""
    project()
    answers = []
    for user in (*users, *users):
        sender = Sender()  # and so another session
        sender.client.force_login(user)
        answers.append(sender.post("/plain"))
    assert [is_replay(answer) for answer in answers] == [False, False, True, True]
    assert answers[0].content != answers[1].content
    assert not is_replay(Sender().post("/plain"))  # without a user


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_user_who_may_no_longer_log_in_gets_no_stored_response(project, users, is_async):
    """S2: the session is the same, but Django finds no user in it any more."""
    project()
    sender = Sender(is_async)
    sender.client.force_login(users[0])
    assert [is_replay(sender.post("/members")) for _ in range(2)] == [False, True]
    users[0].is_active = False
    users[0].save()
    refused = sender.post("/members")
    assert (refused.status_code, is_replay(refused)) == (302, False)
    assert len(django_shop.CALLS) == 1


def test_the_user_is_read_in_a_thread_under_asgi(project, users):
    """S2: the database of the sessions must not be used on the event loop."""
    project()
    answers = []
    for user in (*users, users[0]):
        sender = Sender(is_async=True)
        asyncio.run(sender.client.aforce_login(user))
        answers.append(sender.post("/plain"))
    assert [answer.status_code for answer in answers] == [201] * 3
    assert [is_replay(answer) for answer in answers] == [False, False, True]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_revoked_token_gets_no_stored_response(project, users, is_async):
    """S2: the authenticators of a DRF view run before a replay, and DRF writes the refusal."""
    project()
    sender, token = Sender(is_async), Token.objects.create(user=users[0])
    first, second = (
        sender.post("/restricted", Authorization=f"Token {token.key}") for _ in range(2)
    )
    assert (first.status_code, is_replay(first), is_replay(second)) == (201, False, True)
    token.delete()
    revoked = sender.post("/restricted", Authorization=f"Token {token.key}")
    assert (revoked.status_code, is_replay(revoked)) == (401, False)
    assert json.loads(revoked.content) == {"detail": "Invalid token."}
    assert revoked.headers["WWW-Authenticate"] == "Token"
    # A new token of the same user is the same caller.
    token = Token.objects.create(user=users[0])
    assert is_replay(sender.post("/restricted", Authorization=f"Token {token.key}"))
    assert len(django_shop.CALLS) == 1


def test_the_test_client_of_drf_sees_it_all(project, users):
    """S2: with a user that it has authenticated by force; `data` is DRF's own."""
    project()
    client = APIClient(headers={"Idempotency-Key": "k-1"})
    client.force_authenticate(users[0])
    first = client.post("/restricted", {"item": "coat"}, format="json")
    assert (first.status_code, first.data) == (201, {"number": 1})
    second = client.post("/restricted", {"item": "coat"}, format="json")
    assert (second.json(), is_replay(second)) == ({"number": 1}, True)
    client.force_authenticate(users[1])
    assert not is_replay(client.post("/restricted", {"item": "coat"}, format="json"))


def tenant(request):
    return request.native["django.request"].headers["X-Tenant"]


async def async_tenant(request):
    await asyncio.sleep(0)
    return request.header(b"x-tenant")


@pytest.mark.parametrize("name", ["tenant", "async_tenant"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_function_of_the_project_may_be_the_caller(project, name, is_async):
    """S2: by its dotted path; it finds Django's request."""
    project(caller=f"{__name__}.{name}")
    sender = Sender(is_async)
    answers = [sender.post("/plain", **{"X-Tenant": tenant}) for tenant in "aba"]
    assert [is_replay(answer) for answer in answers] == [False, False, True]


def test_a_project_that_chooses_its_urls_by_host_has_callers_for_each_host(project):
    """X3: user 1 of one tenant is not user 1 of another."""
    path = f"{__name__}.choose_urls"
    project(settings={"MIDDLEWARE": [path, *django_project.MIDDLEWARE]})
    client = Client(headers={"Idempotency-Key": "k-1"})
    answers = [client.post("/plain", headers={"Host": host}) for host in ("a.test", "b.test") * 2]
    assert [is_replay(answer) for answer in answers] == [False, False, True, True]


def choose_urls(get_response):
    def middleware(request):
        request.urlconf = "tests.server.django_shop"
        return get_response(request)

    return middleware


# --- bodies and responses ---------------------------------------------------------------------


def test_an_upload_is_read_by_the_view_and_compared(project):
    """F1: multipart, which Django parses from the stream; and a cookie is not replayed."""
    project()
    client = Client(headers={"Idempotency-Key": "k-1"})

    def send(content):
        file = SimpleUploadedFile("coat.png", content)
        return client.post("/upload", {"file": file, "item": "coat"})

    first, second = send(b"x" * 3_000_000), send(b"x" * 3_000_000)
    assert first.json() == {"size": 3_000_000, "item": "coat"}
    assert (first.cookies["seen"].value, is_replay(second), "seen" in second.cookies) == (
        "1",
        True,
        False,
    )
    assert send(b"y" * 3_000_000).status_code == 422


def test_a_body_that_a_middleware_has_read_before_is_compared_too(project):
    path = f"{__name__}.read_body"
    project(settings={"MIDDLEWARE": [path, *django_project.MIDDLEWARE]})
    for is_async in (False, True):
        sender = Sender(is_async)
        key = f"k-{is_async}"
        answers = [sender.post("/plain", key, {"item": item}) for item in ("a", "a", "b")]
        assert [answer.status_code for answer in answers] == [201, 201, 422]


def read_body(get_response):
    def middleware(request):
        assert request.body
        return get_response(request)

    return middleware


def test_a_multipart_body_that_a_middleware_has_parsed_before_is_a_clear_error(project):
    path = f"{__name__}.parse_body"
    project(settings={"MIDDLEWARE": [path, *django_project.MIDDLEWARE]})
    client = Client(headers={"Idempotency-Key": "k-1"})
    with pytest.raises(Misconfigured, match=r"before the middleware that reads request\.POST"):
        client.post("/upload", {"item": "coat", "file": SimpleUploadedFile("a", b"b")})
    unguarded = Client().post("/upload", {"item": "coat", "file": SimpleUploadedFile("a", b"b")})
    assert unguarded.json() == {"size": 1, "item": "coat"}


def parse_body(get_response):
    def middleware(request):
        assert request.POST
        return get_response(request)

    return middleware


def content_of(response) -> bytes:
    if not response.streaming:
        return response.content
    return response.read if response.is_async else b"".join(response)


def test_a_streamed_response_is_kept_if_it_is_not_too_large(sender):
    """L12: a large one passes as it comes, and its retry is refused."""
    first, second = (sender.post("/stream?size=10", "k-1") for _ in range(2))
    assert content_of(first) == content_of(second) == b"1,xxxxxxxxxxthe end"
    size = Policy().response_bytes_max + 1
    large = sender.post(f"/stream?size={size}", "k-2")
    assert large.streaming
    assert len(content_of(large)) == size + len(b"2,the end")
    assert code_of(sender.post(f"/stream?size={size}", "k-2")) == "result-unavailable"


# --- long work --------------------------------------------------------------------------------


def test_a_view_may_answer_202_and_go_on_under_asgi(project):
    """L10: the client polls for the answer, through the middleware."""
    project()

    async def poll():
        client = AsyncClient()
        headers = {"Idempotency-Key": "k-1"}
        first = await client.post("/accepted", headers=headers)
        assert first.status_code == 202
        async with asyncio.timeout(WAIT_S_MAX):
            while (answer := await client.get(first.headers["Location"])).status_code == 202:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # as a client does
        again = await client.post("/accepted", headers=headers)
        return answer, again

    answer, again = asyncio.run(poll())
    assert (again.status_code, json.loads(again.content)) == (201, {"number": 1})
    assert is_replay(again)
    assert answer.status_code in (200, 201)


def test_a_worker_does_what_a_view_has_deferred(project):
    """L10: with the engine of the project."""
    project()
    sender = Sender()
    accepted = sender.post("/deferred")
    assert accepted.status_code == 202
    (token,) = django_shop.CALLS
    get_engine().run_deferred(token, lambda: Happened(201, (), b"done"))
    answer = sender.post("/deferred")
    assert (answer.status_code, answer.content, is_replay(answer)) == (201, b"done", True)
    found = sender.client.get(accepted.headers["Location"])
    assert found.status_code in (200, 201)


# --- boot and settings ------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_nothing_is_opened_before_the_first_guarded_request(project, tmp_path, is_async):
    """D2: a store that is down gives 503, the rest works, and it recovers by itself."""
    store = tmp_path / "orders.db"
    project(store=f"sqlite:///{store}?busy_timeout=10ms")
    sender = Sender(is_async)
    assert sender.post("/plain", key=None).status_code == 201
    assert not store.exists()
    with closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("begin exclusive")
        down = sender.post("/plain")
        assert (down.status_code, code_of(down)) == (503, "store-unavailable")
        assert "Retry-After" in down.headers
        assert sender.post("/plain", key=None).status_code == 201
        other.execute("rollback")
    assert len(django_shop.CALLS) == 2
    eventually(lambda: sender.post("/plain").status_code == 201)
    assert len(django_shop.CALLS) == 3


@pytest.mark.parametrize(
    ("coatcheck", "message"),
    [
        ({"stoer": "default"}, r"\['stoer'\] is no setting \(did you mean store\?\)"),
        ({"store": "defualt"}, r"neither an alias of DATABASES \(did you mean default\?\)"),
        ({"store": "nothing://"}, "nothing"),
        ({"store": 7}, "an alias of DATABASES, or a URL"),
        ({"policy": "paymnets"}, "paymnets"),
        ({"policy": {"windwo": "1h"}}, "windwo"),
        ({"policy": {"window": "1 fortnight"}}, "fortnight"),
        ({"caller": "tests.nowhere.tenant"}, "cannot be imported"),
        ({"store": "memory://", "policy": {"mode": "transaction"}}, "transaction"),
        ({"transactions": "nowhere"}, "it must be an alias of DATABASES"),
        ({"session_cookies": "sid"}, "session_cookies"),
    ],
)
def test_a_mistake_in_the_settings_stops_the_start(project, coatcheck, message):
    """D2: of a server for WSGI, and of one for ASGI, whose event loop may run already."""
    with override_settings(COATCHECK=coatcheck):
        with pytest.raises(Misconfigured, match=message):
            WSGIHandler()

        async def start():
            ASGIHandler()

        with pytest.raises(Misconfigured, match=message):
            asyncio.run(start())


def messages(*ids) -> list[str]:
    return [found.msg for found in run_checks() if found.id in ids]


def test_a_sound_project_passes_the_checks(project):
    project(store="default")
    assert [found for found in run_checks() if found.id.startswith("coatcheck")] == []


def test_the_checks_find_a_mistake_in_the_settings(project):
    project(store="default", polcy="payments")
    (message,) = messages("coatcheck.E001")
    assert "did you mean policy?" in message


def test_the_checks_find_a_database_that_is_not_the_stores(project, tmp_path):
    """L9: record and effect can only commit together in one database."""
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.db")}
    other = django_project.add_database(file)
    project(store="default", transactions=other)
    (message,) = messages("coatcheck.E001")
    assert "can only commit together" in message


def test_the_checks_find_a_middleware_that_is_missing_or_too_early(project):
    project(settings={"MIDDLEWARE": django_project.MIDDLEWARE[:-1]})
    (message,) = messages("coatcheck.E002")
    assert "no request is guarded" in message
    project(settings={"MIDDLEWARE": [OURS, *django_project.MIDDLEWARE[:-1]]})
    (message,) = messages("coatcheck.E003")
    assert "AuthenticationMiddleware" in message


def test_the_checks_find_a_mark_that_contradicts_the_policy_of_the_project(project):
    """D2: the view is named."""
    project(policy={"window": "1s", "lease": "1s"})
    assert any(
        message.startswith("POST /contradiction: ") for message in messages("coatcheck.E004")
    )


def test_the_checks_find_views_in_transaction_mode_without_a_database(project):
    """L9: on a store that is not in a database of the project."""
    project(store="redis://localhost/0")
    assert any("POST /tx/placed" in message for message in messages("coatcheck.E005"))


def test_an_in_memory_database_of_a_test_run_has_its_store_in_memory(project):
    """The tables of the store could not be seen by another connection."""
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    project(store=django_project.add_database(file))
    sender = Sender()
    assert [is_replay(sender.post("/plain")) for _ in range(2)] == [False, True]


def test_all_handlers_of_a_process_share_one_engine(project):
    project()
    senders = Sender(), Sender()
    assert [is_replay(sender.post("/plain")) for sender in senders] == [False, True]
    site = current_site()
    project(policy={"required": True})
    assert current_site() is not site
    assert code_of(senders[0].post("/plain", key=None)) == "key-missing"  # the same client
    assert senders[0].post("/plain").status_code == 201


def test_observed_requests_run_as_if_they_were_not_guarded(project):
    """R1: in both flavours."""
    project(policy=Policy(mode="observe"))
    for is_async in (False, True):
        sender = Sender(is_async)
        answers = [sender.post("/plain") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert not any(map(is_replay, answers))
    assert len(django_shop.CALLS) == 4


def test_a_route_can_be_switched_off(project, tmp_path):
    """R2: the view gets an operation that nothing guards."""
    switch = tmp_path / "disabled"
    switch.write_text("POST /function\n")
    project(disabled_by=str(switch))
    for is_async in (False, True):
        answers = [Sender(is_async).post("/function", key=None) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
    assert len(django_shop.CALLS) == 4


# --- refusals in the look of the project --------------------------------------------------------


def own_handler(exc, context):
    """The `EXCEPTION_HANDLER` of a project, which gives all errors one shape."""
    from rest_framework.views import exception_handler

    response = exception_handler(exc, context)
    if response is not None:
        response.data = {"error": response.data, "view": type(context["view"]).__name__}
    return response


def failing_handler(exc, context):
    raise RuntimeError("a mistake in the project")


HANDLER = {"EXCEPTION_HANDLER": "tests.server.test_django.own_handler"}


def test_the_handler_of_exceptions_of_a_drf_project_answers_refusals(project, sender):
    """F1: what a client needs to retry stays in the headers."""
    project(settings={"REST_FRAMEWORK": HANDLER})
    first = sender.post("/under-api-view")
    assert first.status_code < 300
    refused = sender.post("/under-api-view", body={"item": "hat"})
    assert refused.status_code == 422
    assert refused.headers["Content-Type"].startswith("application/json")
    assert refused.headers["Idempotency-Reference"] == first.headers["Idempotency-Reference"]
    document = json.loads(refused.content)
    assert document["error"]["code"] == "key-reused"
    assert document["view"] == "under_api_view"


def test_without_a_handler_of_its_own_a_drf_project_answers_with_problem_documents(project, sender):
    project()
    sender.post("/under-api-view")
    refused = sender.post("/under-api-view", body={"item": "hat"})
    assert refused.status_code == 422
    assert refused.headers["Content-Type"] == "application/problem+json"


def test_a_handler_of_exceptions_that_fails_is_no_500(project, sender, caplog):
    failing = {"EXCEPTION_HANDLER": "tests.server.test_django.failing_handler"}
    project(settings={"REST_FRAMEWORK": failing})
    sender.post("/under-api-view")
    refused = sender.post("/under-api-view", body={"item": "hat"})
    assert refused.status_code == 422
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert "the EXCEPTION_HANDLER failed" in caplog.text


def test_the_handler_of_drf_is_not_called_for_other_views(project, sender):
    project(settings={"REST_FRAMEWORK": HANDLER})
    sender.post("/plain")
    refused = sender.post("/plain", body={"item": "hat"})
    assert refused.headers["Content-Type"] == "application/problem+json"
