import sys

import coatcheck

engine = coatcheck.Engine("sqlite:///jobs.db")


@engine.guard(key=lambda number: number, scope="invoices")
def send_invoice(number: int) -> dict[str, int]:
    print("sending invoice", number)
    return {"sent": number}


print(send_invoice(int(sys.argv[1])))
engine.close()
