"""Why a request was not served more tokens from the cache."""

import enum


class Reason(enum.IntEnum):
    """One reason per lookup; NONE: every unit that may be reused was."""

    NONE = 0
    COLD = 1
    EVICTED = 2
    NO_STATE = 3
    GRANULARITY = 4
    SALT = 5
    CAPPED = 6
    SKIPPED = 7
    STORE_FAILURE = 8
    CACHING_OFF = 9

    @property
    def text(self) -> str:
        """What a person reads."""
        return _TEXT[self]


_TEXT = {
    Reason.NONE: "-",
    Reason.COLD: "cold",
    Reason.EVICTED: "evicted",
    Reason.NO_STATE: "no state at boundary",
    Reason.GRANULARITY: "granularity",
    Reason.SALT: "salt",
    Reason.CAPPED: "capped",
    Reason.SKIPPED: "skipped on request",
    Reason.STORE_FAILURE: "store failure",
    Reason.CACHING_OFF: "caching off",
}
