"""The tests of the shop: python manage.py test."""

from uuid import uuid4

from django.contrib.auth.models import User
from django.test import TestCase, TransactionTestCase

from .models import Order


class OrderTests(TransactionTestCase):
    """Orders are in transaction mode, so these tests commit."""

    def setUp(self):
        self.client.force_login(User.objects.create(username="ada"))

    def order(self, key, item="coat"):
        headers = {"Idempotency-Key": key}
        return self.client.post(
            "/orders", {"item": item}, content_type="application/json", headers=headers
        )

    def test_a_retried_order_is_placed_once(self):
        key = str(uuid4())
        first, again = self.order(key), self.order(key)
        self.assertEqual((first.status_code, again.json()), (201, first.json()))
        self.assertEqual(again.headers["Idempotent-Replayed"], "true")
        self.assertEqual(Order.objects.count(), 1)

    def test_a_refusal_writes_nothing_and_is_the_same_for_every_retry(self):
        key = str(uuid4())
        answers = [self.order(key, "hat") for _ in range(2)]
        self.assertEqual([answer.status_code for answer in answers], [409, 409])
        self.assertEqual(Order.objects.count(), 0)

    def test_two_users_may_use_the_same_key(self):
        key = str(uuid4())
        self.order(key)
        self.client.force_login(User.objects.create(username="bob"))
        self.assertNotIn("Idempotent-Replayed", self.order(key).headers)
        self.assertEqual(Order.objects.count(), 2)


class QuoteTests(TestCase):
    """A store in memory is enough for views in record mode."""

    def test_a_retried_quote_is_the_same(self):
        with self.settings(COATCHECK={"store": "memory://"}):
            headers = {"Idempotency-Key": "quote-1"}
            answers = [self.client.post("/quotes", headers=headers) for _ in range(2)]
        self.assertEqual([answer.json() for answer in answers], [{"cents": 500}] * 2)
        self.assertIn("Idempotent-Replayed", answers[1].headers)
