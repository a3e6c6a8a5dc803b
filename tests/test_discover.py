"""Ops without a rule: what is discovered of them, what stays whole and why, and what is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from cases.oracle import Eager
from compare import all_too_far, exact_copy
from meshwright.partitioner.compat import fake_mode
from meshwright.partitioner.rules import discover, rulecache, sandbox
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.found import line_of
from meshwright.partitioner.rules.notation import Rule
from meshwright.partitioner.rules.split import Call
from rulecheck import check_call
from torch import Tensor, nn
from torch.utils._pytree import tree_map

torch.set_num_threads(1)
OPS = torch.ops.discovery


def op(name: str):
    """Decorator: a custom op of this name, whose shapes are those its own code gives on fake tensors."""

    def make(fn: Any) -> Any:
        made = torch.library.custom_op(f"discovery::{name}", mutates_args=())(fn)
        made.register_fake(fn)
        return made

    return make


@op("flip")
def flip(x: Tensor, s: float) -> Tensor:
    return x.flip(-1) * s


flip.register_autograd(
    lambda ctx, g: (OPS.flip(g, ctx.s), None), setup_context=lambda ctx, inputs, output: setattr(ctx, "s", inputs[1])
)


@op("row_norm")
def row_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x * rms * w, rms


@op("product")
def product(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bik,bkj->bij", x, y)


@op("both")
def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y, (x * y).sum(0)


@op("bound")
def bound(x: Tensor) -> Tensor:
    return x.amax(1)


@op("cap")
def cap(x: Tensor) -> Tensor:
    return x.clamp(-100.0, 100.0)


@op("lookup")
def lookup(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


@op("pairs")
def pairs(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


@torch.library.custom_op("discovery::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    if x.shape[0] % 2:
        os.abort()
    return x * 2


fragile.register_fake(torch.empty_like)


@torch.library.custom_op("discovery::stuck", mutates_args=())
def stuck(x: Tensor) -> Tensor:
    while x.shape[0] % 2:
        time.sleep(1)
    return x * 2


stuck.register_fake(torch.empty_like)


@torch.library.custom_op("discovery::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


noise.register_fake(torch.empty_like)


@torch.library.custom_op("discovery::fill", mutates_args={"x"})
def fill(x: Tensor) -> Tensor:
    x.fill_(1.0)
    return x + 1


fill.register_fake(torch.empty_like)


@op("grouped")
def grouped(x: Tensor, rows: int) -> Tensor:
    assert x.shape[0] == rows
    return x.cumsum(-1).flip(0) * rows


@torch.library.custom_op("discovery::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    raise RuntimeError("no CPU here")


picky.register_fake(torch.empty_like)


def T(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def fake_call(target: Any, *args: Any) -> Call:
    with fake_mode():
        faked = tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x, args)
        return Call(target, faked, {}, target(*faked))


def rule(name: str, *args: Any) -> Rule:
    return rule_of(fake_call(getattr(OPS, name).default, *args))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing remembered."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(discover, "_REMEMBERED", {})
    return tmp_path


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The children that were started."""
    started: list[int] = []
    fork = os.fork

    def counted() -> int:
        started.append(0)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    return started


I64, BF16 = torch.int64, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "args", "line", "linear"),
    [
        ("flip", (T(4, 6), 0.5), "a b -> a b (b whole)", [{0}]),
        ("flip", (T(64, 4096, 512), 0.5), "a b c -> a b c (c whole)", [{0}]),
        ("row_norm", (T(2, 16, 64), T(64)), "a b c, d -> a b c, a b 1 (c d whole)", []),
        ("row_norm", (T(2, 16, 64, dtype=BF16), T(64, dtype=BF16)), "a b c, d -> a b c, a b 1 (c d whole)", []),
        ("product", (T(4, 3, 8), T(4, 8, 5)), "a b c, a c d -> a b d {c}", [{0}, {1}]),
        ("product", (T(4, 4, 4), T(4, 4, 4)), "a b c, a c d -> a b d {c}", [{0}, {1}]),
        ("both", (T(8, 12), T(12)), "a b, b -> a b, b {a}", [{0}, {1}]),
        ("both", (T(8, 12), T(8, 12)), "a b, a b -> a b, b {a}", [{0}, {1}]),
        ("bound", (T(4, 9, 1),), "a b 1 -> a 1 {b|max}", []),
        ("cap", (T(9, 9),), "a b -> a b", []),
        ("lookup", (T(100, 16), T(4, 9, dtype=I64)), "a b, c d -> c d b (a whole)", [{0}]),
        ("pairs", (T(4096, 3),), "a b -> a b (a whole)", [{0}]),
        ("fragile", (T(8, 6),), "a b -> a b (a whole)", [{0}]),
    ],
)
def test_what_is_discovered(name: str, args: tuple, line: str, linear: list[set[int]]):
    got = rule(name, *args)
    assert got.discovered == f"rule of discovery::{name} discovered: {line}" and not got.note
    assert line_of(got) == line and [set(s) for s in got.linear] == linear


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("noise", (T(4, 4),), "its values are random"),
        ("fill", (T(4, 4),), "it writes to its operands"),
        ("grouped", (T(64, 1), 64), "its argument 64 is a size of the whole"),
        ("picky", (T(4, 4),), "it does not run on random CPU tensors"),
        ("cap", (T(0, 4),), "it has an empty operand"),
    ],
)
def test_what_stays_whole_says_why(name: str, args: tuple, why: str):
    got = rule(name, *args)
    assert got.note == f"no sharding rule for discovery::{name}: {why}"
    assert got.whole == set(got.factors) and not got.discovered


def test_a_number_that_is_no_size_of_a_split_dim_leaves_the_others_free():
    assert line_of(rule("grouped", T(6, 4, 5), 6)) == "a b c -> a b c (a c whole)"


def test_a_trial_that_hangs_is_no_split(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "SILENCE", 3.0)
    assert line_of(rule("stuck", T(8, 6))) == "a b -> a b (a whole)"


def test_crashes_harm_no_one(capfd: pytest.CaptureFixture[str], forks: list[int]):
    assert rule("fragile", T(8, 6)).discovered
    assert len(forks) > 1 and capfd.readouterr() == ("", "")


def test_discovered_rules_pass_the_proof_of_written_ones():
    x, y = torch.randn(4, 5, 7), torch.randn(4, 7, 3)
    assert check_call(OPS.product.default, (x, y)) == 2 * (4 + 2) + 10 + 4 * 2


def test_a_signature_is_tried_once(forks: list[int]):
    first = rule("flip", T(4, 6), 0.5)
    tried = len(forks)
    assert tried and rule("flip", T(4, 6), 0.5) == first and len(forks) == tried
    rule("flip", T(4, 8), 0.5)
    assert len(forks) > tried


def test_what_is_on_disk_is_not_tried(cache: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch):
    first = rule("flip", T(4, 6), 0.5)
    monkeypatch.setattr(discover, "_REMEMBERED", {})
    tried = len(forks)
    assert rule("flip", T(4, 6), 0.5) == first and len(forks) == tried
    assert len(list((cache / "rules").glob("*.json"))) == 1


@pytest.mark.parametrize("spoiled", ["", '{"key": 1}', "factors", "linear"])
def test_a_spoiled_file_is_ignored(spoiled: str, cache: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch):
    first = rule("flip", T(4, 6), 0.5)
    (file,) = (cache / "rules").glob("*.json")
    if spoiled in ("factors", "linear"):
        body = json.loads(file.read_text())
        body["found"][spoiled] = [[[7], ["7"]]] if spoiled == "factors" else [[9]]
        file.write_text(json.dumps(body))
    else:
        file.write_text(spoiled)
    monkeypatch.setattr(discover, "_REMEMBERED", {})
    tried = len(forks)
    assert rule("flip", T(4, 6), 0.5) == first and len(forks) > tried


def test_no_cache_without_a_home_or_in_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(cache / "file"))
    assert rule("flip", T(4, 6), 0.5).discovered
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(discover, "_REMEMBERED", {})
    assert rule("flip", T(4, 6), 0.5).discovered


SCRIPT = """
import torch
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.split import Call

@torch.library.custom_op("discovery::stored", mutates_args=())
def stored(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1) if "a" in {"a", "b", "c"} else x

stored.register_fake(torch.empty_like)
x = torch.ones(4, 6)
found = rule_of(Call(torch.ops.discovery.stored.default, (x,), {}, stored(x))).discovered
"""
NO_FORK = "import os\nos.fork = None\n"


def test_another_process_reads_what_one_has_found(forks: list[int]):
    here: dict[str, Any] = {}
    exec(SCRIPT, here)
    assert here["found"] == "rule of discovery::stored discovered: a b -> a b (b whole)" and forks
    command = [sys.executable, "-c", NO_FORK + SCRIPT + "print(found)"]
    there = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert there.stdout.strip() == here["found"]


def test_an_op_of_other_code_is_another_op():
    def key(name: str, by: float) -> str | None:
        def twice(x: Tensor) -> Tensor:
            return x * by

        made = torch.library.custom_op(f"discovery::{name}", mutates_args=())(twice)
        made.register_fake(torch.empty_like)
        full = rulecache.full_key(fake_call(getattr(OPS, name).default, T(3)))
        OWN_CODE.append(made)
        return full and full.replace(f"{name}(", "(").replace(f"{name} ", " ")

    assert key("by_two", 2.0) == key("by_two_too", 2.0) != key("by_three", 3.0)
    library = torch.library.Library("discovery", "FRAGMENT")  # noqa: TOR901
    library.define("raw(Tensor x) -> Tensor")
    library.impl("raw", lambda x: x + 1, "CompositeExplicitAutograd")
    assert rulecache.full_key(fake_call(OPS.raw.default, T(3))) is None


OWN_CODE: list[Any] = []  # ops made by a test: they live as long as this module


class Net(nn.Module):
    """Two layers with ops between them that no table knows."""

    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.g(OPS.flip(torch.tanh(self.f(x)), 0.5))


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_with_an_unknown_op_equals_one_device(axes: dict[str, int]):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 6)
    exact, eager = Eager(exact_copy(model), loss=squared), Eager(exact_copy(model).float(), loss=squared)
    compiled: Any = mw.compile(model, mw.Mesh(device=None, links=None, calibration=None, **axes), loss=squared)
    got, one, true = [{"": t.step(i)} | t.gather("grads") for t, i in ((compiled, x), (eager, x), (exact, x.double()))]
    assert not all_too_far("step", got, one, true)
    assert "rule of discovery::flip discovered: a b -> a b (b whole)" in compiled.plan.notes
    flips = [by for name, by in compiled.plan.choices.items() if "flip" in name]
    assert len(flips) == 2 and all(by.get("dp") == ("a", 0) for by in flips if "dp" in axes)


class Noisy(nn.Module):
    """A layer behind an op that has to stay whole."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(OPS.grouped(x, 6))


def test_running_whole_is_noted_with_what_it_costs():
    compiled: Any = mw.compile(Noisy(), mw.Mesh(dp=2), args=(torch.randn(6, 4),), loss=squared)
    (note,) = [n for n in compiled.plan.notes if "discovery::grouped" in n]
    assert "us a step" in note and "no sharding rule" in note
