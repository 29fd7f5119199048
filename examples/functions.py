"""Any function, guarded: a job runner may call it more than once."""

import coatcheck

engine = coatcheck.Engine("sqlite:///jobs.db")
sent: list[str] = []


@engine.guard(key=lambda number, _email: f"invoice-{number}", scope="invoices")
def send_invoice(number: int, email: str) -> dict[str, object]:
    """Send one invoice; a second call with this number returns the result of the first."""
    sent.append(email)
    return {"number": number, "sent_to": email}


if __name__ == "__main__":
    print(send_invoice(7, "ada@example.com"))
    print(send_invoice(7, "ada@example.com"))
    print(f"sent {len(sent)} time(s)")
