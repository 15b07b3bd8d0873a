"""Meanings of the names of columns: ids, amounts, times, and parts of a date."""

import re

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_ID_WORDS = """
id ids uid uuid guid key code zip zipcode postcode postalcode postal hash sku isbn asin ean upc
gtin ip user member visitor customer client account session cookie device household person author
seller buyer merchant vendor supplier driver employee patient agent operator item product article
movie film book song track artist album video channel game hotel restaurant venue recipe brand
make maker manufacturer model campaign adgroup ad advert advertiser creative publisher banner
placement slot keyword query ssp dsp deal cate cat category subcategory genre topic tag segment
segid cluster group type class kind department site app application page url domain host referrer
referer network carrier isp exchange store shop branch warehouse outlet market zone region area
city town village country state county province district neighborhood neighbourhood location loc
geo place station route airport airline browser os platform language lang locale timezone gender
sex occupation job education status color colour document doc display order invoice transaction
vehicle msno imei idfa cid pid sid vid gid
"""
_OTHER_WORDS = """
bid paid unpaid prepaid valid invalid grid covid humid solid rapid fluid avoid mid void raid kid
lid aid acid hybrid android liquid said laid rigid centroid squid outbid
"""
_AMOUNT_WORDS = """
age price prices amount cost costs revenue sales total sum count counts cnt num qty quantity
duration seconds minutes hours days weeks months years length width height depth size weight
distance score rating ratio rate share percent pct percentage mean avg average min max median std
var balance income salary budget bid bids views clicks impressions visits likes orders purchases
temperature speed gain loss tenure interval gap delay latency value volume pages words chars bytes
stars points discount tax fee fare population users items sessions seniority since elapsed ago
recency frequency
"""
_IDS, _AMOUNTS = frozenset(_ID_WORDS.split()), frozenset(_AMOUNT_WORDS.split())
_NOT_IDS = frozenset(_OTHER_WORDS.split())  # which end in "id" all the same
_BEFORE_AMOUNTS = {"num", "n", "nb", "count", "cnt", "total", "avg", "mean", "max", "min", "sum"}
_BEFORE_AMOUNTS |= {"log", "per", "number"}
_NUMBERED_IDS, _NUMBERED_NUMBERS = {"c", "cat", "categorical"}, {"i", "int", "n", "num"}
STAMPS = {"timestamp", "stamp", "ts", "epoch"}  # of moments, and not of durations or clocks
TIMES = STAMPS | {"time", "date", "datetime", "at", "dt", "when"}
CALENDAR = {"hour": 24, "day": 31, "weekday": 7, "dow": 7, "week": 53, "month": 12}  # at most


def is_id(name: str) -> bool:
    """Returns whether a name is that of an id or a category: `user_id`, `adgroupid`, `c7`."""
    last = last_word(name)
    ends = last.endswith(("id", "code")) and last not in _NOT_IDS
    return _stem(name) in _NUMBERED_IDS or (not is_amount(name) and (last in _IDS or ends))


def is_amount(name: str) -> bool:
    """Returns whether a name is that of a number: `price`, `num_items`, `hours_per_week`, `i7`."""
    words = _words(name)
    if is_numbered_number(name) or not words or words[-1] in ("id", "ids"):
        return is_numbered_number(name)
    return words[-1] in _AMOUNTS or not _BEFORE_AMOUNTS.isdisjoint(words[:-1])


def is_numbered_number(name: str) -> bool:
    """Returns whether a name is one of numbers by a digit: `i7`, `num_3`."""
    return _stem(name) in _NUMBERED_NUMBERS


def last_word(name: str) -> str:
    """Returns the last word of a name in lower case, without numbers at its end."""
    return (_words(name) or [""])[-1]


def _stem(name: str) -> str:
    """Returns the name without a number at its end, in lower case; "" without one."""
    stem = re.fullmatch(r"(.*?)[_-]?\d+", name)
    return stem[1].lower() if stem else ""


def _words(name: str) -> list[str]:
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    return words
