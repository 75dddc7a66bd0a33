"""The papers' names for defences."""

from collections.abc import Mapping
from typing import Any

__all__ = ["method_of"]

LETTERS = {"random": "R", "semihard": "M", "softhard": "S", "distance": "D", "hardest": "H", "lga": "LGA"}


def method_of(defence: Mapping[str, Any]) -> str:
    """The papers' name of a defence with its settings (the `defence` section of run.json).

    >>> method_of({"name": "hardness", "source": "softhard", "destination": "lga", "ics": 0.5})
    'HM[S, LGA]&ICS'
    >>> method_of({"name": "natural", "sampler": "random"})
    'N/A[R]'
    >>> method_of({"name": "hardness", "source": "random", "destination": "random", "rise": 0.3, "members": "turns"})
    'HM[R, R+0.3] in turns'
    >>> method_of({"name": "proxy", "form": "trades", "loss": "softmax"})
    'proxy trades'
    >>> method_of({"name": "proxy", "form": "minmax", "triplets": 0.5, "triplet_attack": "hm"})
    'proxy minmax + HM triplets'
    """
    name = str(defence.get("name", ""))
    if name == "tride":
        return _tride(defence)
    if name == "free":
        return f"free {method_of({**defence, 'name': 'hardness'})}"
    if name == "proxy":
        loss, hardened = str(defence.get("loss", "softmax")), defence.get("triplet_attack") == "hm"
        also = f" + {'HM ' if hardened else ''}triplets" if defence.get("triplets") else ""
        return f"proxy {defence.get('form', 'minmax')}" + ("" if loss == "softmax" else f" [{loss}]") + also
    short = {"natural": "N/A", "hardness": "HM"}.get(name, name.upper() if len(name) <= 4 else name)
    if name == "hardness":
        goal = _letter(defence.get("destination")) + (f"+{defence['rise']:g}" if defence.get("rise") else "")
        inside = [_letter(defence.get("source")), f"g_B({goal})" if defence.get("boost") else goal]
    else:
        loss = str(defence.get("loss", "triplet"))  # the default is not shown
        inside = [_letter(defence.get("sampler")), "" if loss == "triplet" else loss]
    words = ", ".join(word for word in inside if word)
    which = {"turns": " in turns", "candidates": " of candidates", "anchors": " of anchors"}
    members = which.get(str(defence.get("members")), "")
    return short + (f"[{words}]" if words else "") + ("&ICS" if defence.get("ics") else "") + members


def _tride(defence: Mapping[str, Any]) -> str:
    """CA-TRIDE, CA-CAP, CA-ANP (Tian et al. 2024, table 3), without the top-rank pair (table 4), or naive."""
    phases = str(defence.get("phases", "both"))
    what = "TRIDE" if phases == "both" else phases.upper()
    code = " (code)" if defence.get("form") == "code" else ""
    if defence.get("guide", "collapseness") != "collapseness":
        return (f"{what} by H" if defence.get("stop", True) else f"naive {what}") + code
    term, loss = (defence.get(f"top_rank_{part}", True) for part in ("term", "loss"))
    without = "" if loss else " w/o L_TR" if term else " w/o TPR"
    sampler = str(defence.get("sampler", "semihard"))
    other = "" if sampler == "semihard" else f"[{_letter(sampler)}]"
    return f"CA-{what}{other}{without}{code}" + ("&ICS" if defence.get("ics") else "")


def _letter(value: Any) -> str:
    if value is None or isinstance(value, str):
        return LETTERS.get(value or "", value or "")
    return f"{value:g}"
