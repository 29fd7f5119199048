"""Keeping: what a handler's answer means for its claim, by the policy's `keep`.

Invariant: what is not known of an answer never makes its work run again (L12). A function is asked
about whole answers only, and one that fails counts as if it had said yes; where a failure leaves
the operation in doubt, an answer that is not final does, too.
"""

from __future__ import annotations

import logging

from coatcheck.core.policy import Policy
from coatcheck.core.replay import KEEP, Fate, Response, encode_response, fate_of
from coatcheck.core.serve import Ending

logger = logging.getLogger("coatcheck")


def ending_of(response: Response, policy: Policy) -> Ending:
    """What the handler's *response* means for its claim."""
    if len(response.body) > policy.response_bytes_max:
        return ending_of_part(response, policy)
    try:
        fate = fate_of(response, policy.keep, reruns=policy.reruns)
    except Exception:
        if not callable(policy.keep):
            raise
        logger.exception("keep= failed, so that nothing of this answer runs again by itself")
        fate = KEEP if policy.reruns else _final_or_in_doubt(response)
    return Ending(KEEP, encode_response(response)) if fate is KEEP else Ending(fate)


def ending_of_part(response: Response, policy: Policy) -> Ending:
    """The same of one that is too large to be kept, or never ends: its status alone decides."""
    keep = "final" if callable(policy.keep) else policy.keep
    return Ending(fate_of(response, keep, reruns=policy.reruns))


def ending_of_accepted(response: Response, policy: Policy) -> Ending:
    """
    The same for a claim whose client was told to ask for the answer later.

    A refusal at the door (401, 403 …) is kept here: its client would never see it otherwise.
    """
    ending = ending_of(response, policy)
    if ending.fate is not Fate.FORGET:
        return ending
    is_kept = len(response.body) <= policy.response_bytes_max
    return Ending(KEEP, encode_response(response) if is_kept else None)


def _final_or_in_doubt(response: Response) -> Fate:
    return KEEP if fate_of(response, "final", reruns=False) is KEEP else Fate.DOUBT
