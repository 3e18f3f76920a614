"""A page for torch's debug server: the transfers that are under way on each rank, and what its keeper says.

    import transfuse.integrations.debug_server
    from torch.distributed.debug import start_debug_server

    start_debug_server(handlers=transfuse.integrations.debug_server.handlers())

Every rank imports this module: that is what lets the rank answer. Rank 0 shows ``/transfuse`` beside torch's own pages.
torch calls its server experimental, and so is this page. It needs what the server needs: jinja2, tabulate, requests.
"""

from __future__ import annotations

import ctypes
import html
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import transfuse
from transfuse._keeper.view import keepers_seen
from transfuse._metrics.under_way import transfers_under_way
from transfuse._sizes import human_bytes
from transfuse._tuning import METRICS_KEEPER_SECONDS, METRICS_PAGE_SECONDS

try:
    from torch._C._distributed_c10d import _register_handler
except ImportError as error:
    raise ImportError(
        "transfuse.integrations.debug_server needs torch 2.13 or newer, with torch.distributed"
    ) from error

__all__ = ["TransfuseHandler", "handlers", "seen"]

#: Of what each rank answers, and of the page.
NAME = "transfuse"


def seen() -> dict[str, Any]:
    """What this process has to say: its transfers under way, and the status of its keeper."""
    return {
        "pid": os.getpid(),
        "version": transfuse.__version__,
        "transfers": transfers_under_way(),
        "keepers": keepers_seen(METRICS_KEEPER_SECONDS),
    }


def _answer(request: Any, response: Any) -> None:
    """Called by the rank's worker server, in a thread of its own."""
    response.set_content(json.dumps(seen()).encode(), "application/json")
    response.set_status(200)


# torch's registry lets go of it when the interpreter has ended already. If it were freed then, the process would crash
# ("PyThreadState_Get: the function must be called with the GIL held"; torch 2.13). So it is never freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
_register_handler(NAME, _answer)


def handlers() -> list[Any]:
    """torch's own handlers and ours, for ``start_debug_server(handlers=…)``."""
    from torch.distributed.debug._debug_handlers import default_handlers

    return [*default_handlers(), TransfuseHandler()]


class TransfuseHandler:
    """The page ``/transfuse``, and ``transfuse`` among what the server can dump (``enabled_dumps``).

    It has what torch's ``DebugHandler`` asks for. To derive from that takes jinja2, which only rank 0 needs.
    """

    fetch_timeout = METRICS_PAGE_SECONDS

    def routes(self) -> list[Any]:
        from torch.distributed.debug._frontend import Route

        return [Route(f"/{NAME}", self._show)]

    def nav_links(self) -> list[Any]:
        from torch.distributed.debug._frontend import NavLink

        return [NavLink(f"/{NAME}", NAME)]

    def templates(self) -> dict[str, str]:
        return {}

    def dump_filename(self) -> str:
        return NAME

    def dump(self) -> str:
        addresses, told = self._fetch()
        parts = [f"=== Rank {rank}: {address} ===\n{told[rank].text}" for rank, address in enumerate(addresses)]
        return "\n".join(parts)

    def _show(self, request: Any) -> bytes:
        addresses, told = self._fetch()
        for one in told:
            one.text = html.escape(one.text)  # torch's template does not.
        page: bytes = request.frontend.render_template("raw_resp.html", title=NAME, addrs=addresses, resps=told)
        return page

    def _fetch(self) -> tuple[list[str], list[Any]]:
        """What all ranks say, as text."""
        from torch.distributed.debug._frontend import fetch_all

        addresses, told = fetch_all(NAME, timeout=self.fetch_timeout)
        for one in told:
            if one.status_code == 200:
                one.text = "\n".join(_lines(json.loads(one.text)))
        return addresses, told


def _lines(told: Mapping[str, Any]) -> list[str]:
    """What one rank says, for people."""
    transfers = told["transfers"]
    lines = [f"process {told['pid']}, transfuse {told['version']}", f"transfers under way: {len(transfers)}"]
    for one in transfers:
        step = "any step" if one["step"] is None else f"step {one['step']}"
        lines.append(f"  {one['transfer']}, {step}, for {one['seconds']:g} s")
        for rank, peer in one["peers"].items():
            total = "" if peer["total_bytes"] is None else f" of {human_bytes(peer['total_bytes'])}"
            lines.append(f"    rank {rank}: {peer['phase']}, {human_bytes(peer['bytes'])}{total}")
    for keeper in told["keepers"]:
        lines += _of_keeper(keeper)
    return lines


def _of_keeper(status: Mapping[str, Any]) -> list[str]:
    if "error" in status:
        return [f"keeper in {status['directory']}: {status['error']}"]
    confirmed = "none" if status["confirmed_step"] is None else status["confirmed_step"]
    return [
        f"keeper {status['pid']} in {status['directory']}",
        f"  generation {status['generation']}, attached ranks {status['attached']}, confirmed step {confirmed}, "
        f"{human_bytes(status['bytes'])}",
        *(f"  {_held(one)}" for one in status["states"]),
        f"  replicas: {_pairs(status['replicas'])}",
    ]


def _held(one: Mapping[str, Any]) -> str:
    kind, torn = "replica" if one["replica"] else "slot", "" if one["whole"] else ", not whole"
    return f"rank {one['rank']}: step {one['step']} in a {kind} of {human_bytes(one['bytes'])}{torn}"


def _pairs(told: Mapping[str, Any]) -> str:
    shown: Sequence[str] = [f"{name} {value}" for name, value in told.items()]
    return ", ".join(shown)
