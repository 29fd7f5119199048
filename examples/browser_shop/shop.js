import { createClient } from "/coatcheck.js";

// A short timeout: a lost answer is sent for again soon.
const client = createClient({ retry: { timeoutMs: 1_500 } });
const list = document.querySelector("#orders");

// What the server has, and what the customer has ordered since; the page shows both.
const confirmed = new Map(); // number: order
const open = new Map(); // key: {item, state, reason}

const order = client.optimistic({
  name: "order",
  apply: ({ item }, { key }) => show(open.set(key, { item, state: "pending" })),
  revert: ({ item }, { key, reason }) => show(open.set(key, { item, state: "refused", reason })),
  confirm(_input, { key, answer }) {
    const placed = JSON.parse(answer.body);
    confirmed.set(placed.number, placed);
    show(open.delete(key));
  },
});

for (const button of document.querySelectorAll("[data-item]")) {
  const { item } = button.dataset;
  button.addEventListener("click", () => order.submit("POST", "/orders", { item }));
}

const losing = document.querySelector("#losing");
losing.addEventListener("change", () => client.put("/network", { losing: losing.checked }));

const LABELS = {
  pending: "Sending …",
  confirmed: "Confirmed",
  refused: "Not ordered",
  "sold-out": "Sold out", // the reason of this refusal
};

function show() {
  const rows = [
    ...[...open.values()].reverse(),
    ...[...confirmed.values()].reverse().map((placed) => ({ ...placed, state: "confirmed" })),
  ];
  document.querySelector("#empty").hidden = rows.length > 0;
  list.replaceChildren(...rows.map(row));
}

function row({ item, state, reason, number }) {
  const made = document.createElement("li");
  made.className = state;
  const name = document.createElement("span");
  name.textContent = number ? `№ ${number} · ${item}` : item;
  const label = document.createElement("span");
  label.className = "state";
  label.textContent = LABELS[reason] ?? LABELS[state];
  made.append(name, label);
  return made;
}

losing.checked = (await (await client.get("/network")).response.json()).losing;
for (const placed of await (await client.get("/orders")).response.json())
  confirmed.set(placed.number, placed);
for (const { key, state, reason, optimistic } of await client.outbox.deadLetters())
  if (state === "refused") open.set(key, { item: optimistic.input.item, state, reason });
show();
await client.outbox.start();
document.body.dataset.ready = "yes";
