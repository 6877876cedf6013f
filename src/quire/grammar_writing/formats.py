r"""Formats of strings in JSON schemas that grammars enforce, as regular expressions of the whole string.

RFC 3339 (dates, times, durations), RFC 1123 (host names), RFC 2673 and 4291 (addresses), RFC 3986 (URIs), RFC 4122
(UUIDs), and the part of RFC 5321 without quoted names (email). The names are those that llguidance enforces in JSON.
"""

from collections.abc import Mapping

_MONTHS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = rf"[0-9]{{4}}-{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME_PART = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATE_PART = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join([
    rf"(?:{_HEX}:){{7}}{_HEX}",
    *(rf"(?:{_HEX}:){{{before}}}(?::{_HEX}){{1,{7 - before}}}" for before in range(1, 7)),
    rf":(?::{_HEX}){{1,7}}",
    rf"(?:{_HEX}:){{1,7}}:",
    "::",
])  # fmt: skip
_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = rf"(?:/{_CHARACTER}*)*"
_AUTHORITY = rf"//(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}})*(?::[0-9]*)?{_PATH}"
_QUERY = rf"(?:\?(?:{_CHARACTER}|[/?])*)?(?:#(?:{_CHARACTER}|[/?])*)?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

FORMATS: Mapping[str, str] = {
    "date-time": rf"(?:{_DATE})[Tt](?:{_TIME})",
    "time": _TIME,
    "date": _DATE,
    "duration": rf"P(?:{_DATE_PART}(?:{_TIME_PART})?|{_TIME_PART}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|/?{_CHARACTER}+{_PATH}){_QUERY}",
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
}
