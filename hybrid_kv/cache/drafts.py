"""How a drafter that reads the next token is kept from stale rows at the end of a hit."""

import enum


class Draft(enum.StrEnum):
    """A draft layer's row at position p depends on token p + 1, so the last row of a shared prefix belongs to the
    request that wrote it. NONE: the drafter reads no next token. DROP: a hit ends one hash unit before the prefix that
    is known to be shared; a draft group's unit goes by the prefix that ends one unit later, so it is never taken
    from a request that went on differently. LOOKAHEAD: a unit's key also covers the next tokens.
    """

    NONE = "none"
    DROP = "drop"
    LOOKAHEAD = "lookahead"
