"""Dates as a regular expression with the length of every month: the compiler's own formats allow 2021-02-30."""

_LONG = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
_SHORT = "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(0[1-9]|1[0-9]|2[0-8])"
_OF_FOUR = "0[48]|[2468][048]|[13579][26]"
_LEAP_YEAR = f"([0-9]{{2}}({_OF_FOUR})|(00|{_OF_FOUR})00)"
_DATE = f"([0-9]{{4}}-({_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR = "([01][0-9]|2[0-3])"
# The compiler reads "?" behind a group in another way, see `patterns.in_json`.
_TIME = f"{_HOUR}:[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+){{0,1}}(Z|[+-]{_HOUR}:[0-5][0-9])"

PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""The patterns of the formats that hold a date, as RFC 3339 has them: in capitals, a leap second at any minute."""
