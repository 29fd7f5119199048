"""The swaps that the tests of the PostgreSQL store make."""

from coatcheck.core.record import Swap, completed
from tests.stores.laws.records import ID, claim_of, id_of

MANY = [id_of(number) for number in range(1, 21)]


def claim(id=ID, nonce=1):
    return Swap(id, 0, claim_of(id, nonce=nonce))


def complete(record, response=b"done"):
    return Swap(record.id, record.version, completed(record, response))


def delete(id):
    return Swap(id, claim_of(id).version, None)
