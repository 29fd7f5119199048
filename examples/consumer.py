"""A handler of messages, tried without a broker.

Run it: python examples/consumer.py
"""

from coatcheck.consumer import Acknowledge, DeadLetter, Inbox, Message

inbox = Inbox("memory://", consumer="billing")
invoices = []


@inbox.handler()
def on_paid(message, operation):
    invoices.append((message.json()["order"], operation.derive("invoice")))


def main():
    message = Message(b'{"order": 17}', message_id="paid-17")
    assert on_paid.handle_blocking(message) == Acknowledge()
    assert on_paid.handle_blocking(message) == Acknowledge(is_duplicate=True)
    assert len(invoices) == 1

    other = Message(b'{"order": 18}', message_id="paid-17")
    action = on_paid.handle_blocking(other)
    assert isinstance(action, DeadLetter)
    print(len(invoices), "invoice;", action.reason)


if __name__ == "__main__":
    main()
