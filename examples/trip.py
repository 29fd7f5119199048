"""A trip as a saga: a flight, a hotel and a payment, all of them or none."""

import asyncio
import tempfile
from dataclasses import dataclass

from coatcheck import DidNotHappen, Happened
from coatcheck.saga import AsyncSaga, SagaBlocked, Sagas, SagaUndone

directory = tempfile.TemporaryDirectory()
sagas = Sagas(f"sqlite:///{directory.name}/sagas.db")


@dataclass
class Trip:
    """What a customer orders."""

    id: str
    price: int


class Agency:
    """The services that the saga calls; each acts once for each key."""

    def __init__(self) -> None:
        self.done: dict[str, str] = {}
        self.balance = 100
        self.is_timing_out = False

    def act(self, key: str, what: str, costs: int = 0) -> str:
        """Do it once for *key*."""
        if key not in self.done:
            if costs > self.balance:
                raise ValueError("the card has too little money")
            self.balance -= costs
            self.done[key] = what
        if self.is_timing_out:
            self.is_timing_out = False
            raise TimeoutError
        return self.done[key]


agency = Agency()


async def book_flight(trip: Trip, *, key: str) -> str:
    return agency.act(key, f"seat {trip.price}")


async def cancel_flight(trip: Trip, *, key: str, result: str) -> None:
    agency.act(key, f"{result} to {trip.id} is cancelled")


def book_hotel(trip: Trip, *, key: str) -> str:
    return agency.act(key, f"room of {trip.id}")


def cancel_hotel(trip: Trip, *, key: str) -> None:
    agency.act(key, f"room of {trip.id} is cancelled")


async def charge(trip: Trip, *, key: str) -> int:
    agency.act(key, "charged", trip.price)
    return trip.price


async def refund(trip: Trip, *, key: str) -> None:
    agency.act(key, "refunded", -trip.price)


async def find_charge(trip: Trip, *, key: str) -> Happened | DidNotHappen:
    return Happened(value=trip.price) if key in agency.done else DidNotHappen()


async def send_tickets(trip: Trip, *, key: str) -> str:
    return agency.act(key, f"tickets of {trip.id}")


@sagas.saga("trip", key=lambda trip: trip.id)
async def book(saga: AsyncSaga, trip: Trip) -> str:
    await saga.gather(
        saga.step("flight", book_flight, trip, undo=cancel_flight),
        saga.step("hotel", book_hotel, trip, undo=cancel_hotel),
    )
    await saga.step("charge", charge, trip, undo=refund, probe=find_charge)
    saga.pivot()
    return await saga.step("tickets", send_tickets, trip, remembered_for="24h")


async def main() -> None:
    sagas.start()

    print(await book(Trip("Rome", price=30)))
    print(await book(Trip("Rome", price=30)), "again, and", agency.balance, "are left")

    try:
        await book(Trip("Tokyo", price=900))
    except SagaUndone as undone:
        print(undone)
    print(agency.done["trip:Tokyo:hotel:undo"])

    agency.is_timing_out = True
    try:
        print(await book(Trip("Oslo", price=40)), "after a time-out;", agency.balance, "are left")
    except SagaBlocked as blocked:
        print(blocked)

    shown = await asyncio.to_thread(sagas.show, "Tokyo")
    print(shown.state, [f"{step.name}: {step.state}" for step in shown.steps])
    await sagas.aclose()


if __name__ == "__main__":
    print(book.picture())
    asyncio.run(main())
    directory.cleanup()
