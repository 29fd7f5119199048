"""Our clients against a server that is not ours: moto's certificate manager of AWS.

It recognises a repeated request by a token in the JSON body, with code of its own. Between it and
the client a network loses answers.
"""

import uuid

import httpx2
import pytest
from moto.server import ThreadedMotoServer

from coatcheck.client import Preset, RetryPolicy
from tests.client.drivers import CLIENTS
from tests.support.lossy_relay import LossyRelay

CERTIFICATES = Preset(
    name="certificates", key_header=None, key_member="IdempotencyToken", replayed_header=None
)
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=a/20260101/eu-west-1/acm/aws4_request, "
    "SignedHeaders=host, Signature=x"
)

on_clients = pytest.mark.parametrize("driver", CLIENTS, ids=repr)


@pytest.fixture(scope="module")
def port():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


def headers(operation):
    return {
        "X-Amz-Target": f"CertificateManager.{operation}",
        "Content-Type": "application/x-amz-json-1.1",
        "Authorization": SIGNED,
    }


def certificates(port, domain):
    """The certificates for *domain* that the server has made."""
    url = f"http://127.0.0.1:{port}/"
    listed = httpx2.post(url, json={}, headers=headers("ListCertificates")).json()
    return [
        one["CertificateArn"]
        for one in listed["CertificateSummaryList"]
        if one["DomainName"] == domain
    ]


def requested(driver, url, domain, **options):
    return driver.post(
        f"{url}/",
        json={"DomainName": domain},
        headers=headers("RequestCertificate"),
        preset=CERTIFICATES,
        **options,
    )


@on_clients
def test_a_server_that_is_not_ours_does_it_once(driver, port):
    """C1, C2, C-02: answers are lost, cut in half, and lost by a reset connection."""
    domain = f"{uuid.uuid4().hex}.example"
    with LossyRelay(port, "lose", "half", "reset") as network:
        got = requested(driver, network.url, domain, action={"key": uuid.uuid4().hex})
    assert (got.status, got.result.outcome, got.result.attempts) == (200, "done", 4)
    assert len(network.requests) == 4
    made = certificates(port, domain)
    assert len(made) == 1
    assert made[0].encode() in got.body


@on_clients
def test_without_a_key_the_same_losses_do_it_again_and_again(driver, port):
    """C-20: what the key is for; the application has to allow it against the rules."""
    domain = f"{uuid.uuid4().hex}.example"
    retry = RetryPolicy(methods_without_key={"POST"})
    with LossyRelay(port, "lose", "half", "reset") as network:
        requested(driver, network.url, domain, action={"send_key": False}, retry=retry)
    assert len(certificates(port, domain)) == 4
