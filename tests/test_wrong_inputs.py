"""Wrong inputs: each gets an error of ours that names the fix. The table of docs/errors.md is made from this list."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PAGE_HEAD = """# Errors

What one did, and what it says. The list is `tests/test_wrong_inputs.py`; the texts are what the errors say
(`pytest tests/test_wrong_inputs.py --update-golden` writes this page).

| what one did | what it says |
|---|---|
"""


def mlp(out: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, out), nn.ReLU(), nn.Linear(out, 4))


def mesh(**axes: int) -> mw.Mesh:
    return mw.Mesh(**(axes or {"tp": 2}), device="cpu")  # type: ignore[arg-type]


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step(model: nn.Module | None = None, on: Any = None, x: torch.Tensor | None = None, **options: Any) -> mw.Compiled:
    """Compile and run one step; `target` goes to the step."""
    target = options.pop("target", None)
    given: dict[str, Any] = {"loss": mean} | options
    compiled = mw.compile(model or mlp(), on or mesh(), **given)
    compiled.step(torch.ones(4, 6) if x is None else x, target=target)
    return compiled


def dp2(**options: Any) -> mw.Compiled:
    return step(on=mesh(dp=2), **options)


def untouched(**options: Any) -> mw.Compiled:
    return mw.compile(mlp(), mesh(), **options)


X6 = torch.ones(4, 6)


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda grad: 3 * grad)  # type: ignore[union-attr]
    return model


class Wilful(nn.Module):
    """A linear layer whose forward then does something with the data's values."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.f, self.then = nn.Linear(6, 4), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.f(x))


class Clamps(Wilful):
    """Keeps its weights small."""

    def __init__(self):
        super().__init__(lambda h: h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.f.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def branch(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h


def branch_by_item(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.mean().item() > 0.5 else h


def by_numpy(h: torch.Tensor) -> torch.Tensor:
    return h + torch.from_numpy(h.detach().numpy())


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear, self.what = nn.Linear(6, 4), what

    def forward(self, x):
        return self.what(self.linear(x))


class LearntLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output * self.w).mean()


def backward_twice() -> None:
    loss = mw.compile(mlp(), mesh())(torch.ones(4, 6)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def load(change: Callable[[dict[str, Any]], Any]) -> None:
    compiled = step()
    values = compiled.state_dict()
    change(values)
    compiled.load_state_dict(values)


def on_meta() -> None:
    with torch.device("meta"):
        model = mlp()
    step(model)


def plan_text() -> str:
    return step().plan.to_text()


@dataclass(frozen=True)
class Wrong:
    """What one did, how, and words that the error must say."""

    what: str
    do: Callable[[], Any]
    says: str
    env: tuple[tuple[str, str], ...] = ()


def other_sgd(m: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


LAUNCHED = (("RANK", "0"), ("WORLD_SIZE", "3"))
HALF = '{"mesh": {"tp": 2}}'

WRONG = [
    # the mesh
    Wrong("a mesh axis of size 0", lambda: mw.Mesh(dp=0), "at least 1; Mesh(dp=2, tp=4); got dp=0"),
    Wrong("a mesh without axes", lambda: mw.Mesh(), "needs axes; got no axis"),
    Wrong("a mesh size that is no whole number", lambda: mw.Mesh(dp=2.0), "got dp=2.0"),  # type: ignore[arg-type]
    Wrong("a gradient hook of a parameter", lambda: step(hooked()), "0.weight has a gradient hook; after backward()"),
    Wrong("an unknown device", lambda: mw.Mesh(dp=2, device="h1000"), "no device preset 'h1000'; h100"),
    Wrong("auto_mesh of one device", lambda: mw.auto_mesh(mlp(), 1, args=(X6,)), "at least 2"),
    Wrong(
        "auto_mesh of half a node",
        lambda: mw.auto_mesh(mlp(), 12, per_node=8, args=(X6,)),
        "devices=12 are no whole number of nodes of per_node=8",
    ),
    Wrong("auto_mesh without a call", lambda: mw.auto_mesh(mlp(), 4), "pass args="),
    Wrong(
        "auto_mesh with links of axes",
        lambda: mw.auto_mesh(mlp(), 4, args=(X6,), links={"tp": "nvlink4"}),
        "the link inside a node",
    ),
    Wrong("an unknown link", lambda: mw.Mesh(dp=2, links={"dp": "wifi"}), "no link preset 'wifi'; nvlink4"),
    Wrong("a link for an axis that the mesh has not", lambda: mw.Mesh(dp=2, links={"tp": "pcie4"}), "['tp']; ['dp']"),
    Wrong("a dict as the mesh", lambda: mw.compile(mlp(), {"dp": 2}), "meshwright.Mesh; not dict; Mesh(dp=2, tp=2)"),
    Wrong(
        "a mesh of 2 ranks in a launch of 3 processes",
        lambda: mw.compile(mlp(), mesh(dp=2)),
        "2 ranks; 3 processes; --nproc-per-node 2",
        LAUNCHED,
    ),
    # the model and its call
    Wrong("a function as the model", lambda: mw.compile(mean, mesh()), "torch.nn.Module, not function"),  # type: ignore[arg-type]
    Wrong(
        "a branch on a tensor's value",
        lambda: step(Wilful(branch)),
        "data-dependent branch; torch.where; test_wrong_inputs.py",
    ),
    Wrong("a branch on .item()", lambda: step(Wilful(branch_by_item)), "data-dependent branch; test_wrong_inputs.py"),
    Wrong(".numpy() in forward", lambda: step(Wilful(by_numpy)), "numpy; torch functions; test_wrong_inputs.py"),
    Wrong(
        "an embedding with sparse gradients",
        lambda: step(nn.Embedding(9, 4, sparse=True), x=torch.arange(4)),
        "sparse gradient of 'weight'; sparse=False",
    ),
    Wrong("a meta-device model stepped without values", on_meta, "no values yet; load_state_dict"),
    Wrong(
        "an index out of range",
        lambda: step(nn.Embedding(9, 4), x=torch.tensor([0, 9])),
        "rank 0; embedding; index out of range",
    ),
    Wrong("batch_dims of an unknown argument", lambda: step(batch_dims={"nope": 0}), "'nope'; ['input']"),
    Wrong("batch_dims of a dim that is not there", lambda: step(batch_dims={0: 7}), "[4, 6]; 0 to 1"),
    Wrong("inputs= of another word", lambda: step(inputs="mine"), "'global' or 'local'"),
    Wrong("inputs='local' in one process", lambda: step(on=mesh(dp=2), inputs="local"), "torchrun; global batch"),
    # the loss
    Wrong("a loss that is not 0-d", lambda: step(loss=lambda o: o.mean(0)), "0-d loss; (4,)"),
    Wrong("no loss, and a model that returns none", lambda: step(loss=None), "0-d loss; loss=callable(output)"),
    Wrong(
        "a loss of a tensor, and a model that returns a dict",
        lambda: step(Returns(lambda y: {"logits": y}), loss=lambda o: o.mean()),
        "a dict of 'logits'; 'dict' object has no attribute; lambda output, target",
    ),
    Wrong(
        "no loss, and a model that returns a dict",
        lambda: step(Returns(lambda y: {"loss": y.mean()}), loss=None),
        "0-d loss; a dict of 'loss'; loss=callable(output)",
    ),
    Wrong(
        "a loss, and a model that returns None",
        lambda: step(Returns(lambda y: None), loss=lambda o: o.mean()),
        "what the model returns, None",
    ),
    Wrong("a loss with parameters", lambda: step(loss=LearntLoss()), "parameters of its own; part of the model"),
    Wrong(
        "a loss that depends on no parameter",
        lambda: step(loss=lambda o: torch.ones(())),
        "does not depend on any parameter; frozen; detached",
    ),
    Wrong("a number as the loss", lambda: step(loss=0.5), "callable; got float"),
    Wrong("a loss of three arguments", lambda: step(loss=lambda a, b, c: a.mean()), "(output) or (output, target)"),
    Wrong("no target for a loss that takes one", lambda: step(loss=F.mse_loss), "no target; step(..., target=labels)"),
    Wrong(
        "a target without its name",
        lambda: mw.compile(mlp(), mesh(dp=2), loss=F.mse_loss).step(torch.ones(4, 6), torch.ones(4, 4)),
        "too many positional arguments; step(x, target=labels)",
    ),
    Wrong(
        "a batch norm that averages over all steps",
        lambda: step(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None))),
        "1: BatchNorm with momentum=None; give it a momentum",
    ),
    Wrong(
        "a target for a loss that takes none",
        lambda: step(target=torch.ones(4)),
        "(output) alone; lambda output, target",
    ),
    Wrong("a target, but no loss", lambda: step(loss=None, target=torch.ones(4)), "target=; pass the loss"),
    Wrong("an array of numpy", lambda: untouched().step(X6.numpy()), "argument 0 is an array of numpy; from_numpy"),
    Wrong("a schedule without a pipeline", lambda: step(schedule="1f1b"), "schedule='1f1b' is of a pipeline; no axis"),
    Wrong("a parameter that forward writes into", lambda: step(Clamps()), "writes into parameter f.weight; buffers"),
    Wrong("a dtype that a layer does not take", lambda: step(x=X6.double()), "mm; torch.float64; torch.float32"),
    # the optimizer
    Wrong(
        "an optimizer that is not element-wise, on split parameters",
        lambda: step(optimizer=lambda m: torch.optim.Adafactor(m.parameters())),
        "Adafactor is not element-wise; 0.weight; AdamW; zero=0",
    ),
    Wrong(
        "an optimizer that evaluates the loss itself",
        lambda: dp2(optimizer=lambda m: torch.optim.LBFGS(m.parameters())),
        "LBFGS evaluates the loss itself, by a closure; AdamW",
    ),
    Wrong(
        "an optimizer factory that returns None", lambda: step(optimizer=lambda m: None), "returned NoneType; lambda m:"
    ),
    Wrong("an optimizer in place of a factory", lambda: step(optimizer=other_sgd(None)), "not SGD; lambda m:"),
    Wrong(
        "an optimizer of the model's own parameters", lambda: step(optimizer=other_sgd), "train nothing; m.parameters()"
    ),
    Wrong(
        "a scheduler without an optimizer",
        lambda: untouched().scheduler(lambda o: None),
        "needs an optimizer; optimizer=lambda m:",
    ),
    Wrong("offload=True", lambda: step(offload=True), "offload=True; 'none', 'full'; Offload(offload_optimizer='cpu')"),
    Wrong(
        "offload of another device",
        lambda: step(offload=mw.Offload("disk"), optimizer=torch.optim.AdamW),
        "offload_optimizer='disk'; 'none', 'cpu' or 'nvme'",
    ),
    Wrong(
        "activations offloaded to files",
        lambda: step(offload=mw.Offload(offload_activations="nvme")),
        "offload_activations='nvme'; 'none' or 'cpu'",
    ),
    Wrong(
        "offload to a folder that is not there",
        lambda: step(offload=mw.Offload("nvme", nvme_path="/no/such"), optimizer=torch.optim.AdamW),
        "nvme_path='/no/such'; no folder; make it",
    ),
    Wrong(
        "offload to files without a folder",
        lambda: step(offload=mw.Offload("nvme", sub_group_size=0), optimizer=torch.optim.AdamW),
        "nvme_path=None; needs a folder; sub_group_size=0",
    ),
    Wrong(
        "a folder for files, but no files",
        lambda: step(offload=mw.Offload("cpu", nvme_path="/tmp"), optimizer=torch.optim.AdamW),
        "nvme_path='/tmp'; offload_optimizer='nvme'; leave it out",
    ),
    Wrong(
        "too few buffers for Adam",
        lambda: step(offload=mw.Offload("nvme", nvme_path="/tmp", buffer_count=3), optimizer=torch.optim.AdamW),
        "buffer_count=3; AdamW needs 4; at least 4",
    ),
    Wrong(
        "an optimizer of whole tensors, with state in files",
        lambda: step(
            offload=mw.Offload("nvme", nvme_path="/tmp"), optimizer=lambda m: torch.optim.Adafactor(m.parameters())
        ),
        "Adafactor is not element-wise; a part at a time; offload='full'",
    ),
    Wrong(
        "an offload ratio of 2",
        lambda: step(offload=mw.Offload("cpu", ratio=2), optimizer=torch.optim.AdamW),
        "ratio=2; at most 1",
    ),
    Wrong("offload without an optimizer", lambda: step(offload="full"), "no optimizer; leave offload= out"),
    Wrong("a timeout that is no time", lambda: step(timeout=0), "timeout=0; seconds"),
    Wrong("a synchronisation that there is not", lambda: step(sync="soon"), "sync='soon'; 'k-async'"),
    Wrong("workers in one process", lambda: dp2(sync="async"), "needs one process a worker; mw.ParameterServer"),
    Wrong("a K beside lock step", lambda: dp2(k=2), "k=2 goes with; leave it out"),
    Wrong("workers on other axes than dp", lambda: step(sync="k-sync", k=1), "mesh tp=2 has more than dp"),
    Wrong("checks that never come", lambda: step(check_every=0), "check_every=0; at least 1"),
    Wrong('precision="bf8"', lambda: step(precision="bf8"), "precision='bf8'; None, 'bf16', 'fp16' or a Precision"),
    Wrong("a torch dtype as the precision", lambda: step(precision=torch.bfloat16), "'bf16', 'fp16' or a Precision"),
    Wrong(
        "a loss scale with bf16",
        lambda: step(precision=mw.Precision("bf16", loss_scale=mw.LossScale())),
        "bfloat16 has the range of float32; leave loss_scale= out",
    ),
    Wrong(
        "wrong values of a loss scale",
        lambda: step(precision=mw.Precision("fp16", loss_scale=mw.LossScale(hysteresis=0, min_loss_scale=-1))),
        "hysteresis=0; at least 1; min_loss_scale=-1",
    ),
    Wrong(
        "gradients of bf16 reduced in fp16",
        lambda: step(precision=mw.Precision("bf16", reduce="fp16")),
        "reduce='fp16'; 'fp32' or 'bf16'",
    ),
    Wrong(
        "a parameter to be kept that is not there",
        lambda: step(precision=mw.Precision("bf16", keep=("router.*",))),
        "no parameter has the name 'router.*'; 0.weight",
    ),
    Wrong("one name as keep=", lambda: step(precision=mw.Precision("bf16", keep="0.*")), "keep='0.*'; a tuple"),  # type: ignore[arg-type]
    Wrong(
        "precision on a model in bfloat16",
        lambda: step(mlp().bfloat16(), precision="bf16"),
        "master weights in float32; 4 trained parameters are torch.bfloat16, such as 0.weight; leave precision= out",
    ),
    Wrong(
        "a plan of another precision",
        lambda: step(plan=step(precision="bf16").plan),
        "for precision 'bf16 of float32 weights; compile has None; plan again without plan=",
    ),
    Wrong(
        "inf in the loss at the least scale",
        lambda: step(
            precision=mw.Precision("fp16", loss_scale=mw.LossScale(initial_scale_power=0, hysteresis=1)),
            x=torch.full((4, 6), torch.inf),
        ),
        "loss scale is at its minimum, 1; the step was skipped; 'bf16'",
    ),
    Wrong("clip_grad_norm of a wrong kind", lambda: step(clip_grad_norm="1"), "clip_grad_norm='1'; positive"),
    # layouts
    Wrong(
        "a pin with another number of dims", lambda: step(pin={"0.weight": "[o:tp]"}), "1 dims; has 2; one entry a dim"
    ),
    Wrong(
        "a pin that cannot hold",
        lambda: step(on=mesh(tp=16), pin={"0.weight": "[o:tp, i]"}),
        "cannot hold for 0.weight; tp=16; legal there",
    ),
    Wrong("a pin that is no layout", lambda: step(pin={"0.weight": "o:tp i"}), "no layout; '[b:dp, s, h:tp] +cp'"),
    Wrong("a pin on an axis that the mesh has not", lambda: step(pin={"0.weight": "[o:zz, i]"}), "['zz']; ['tp']"),
    Wrong("a pin with one axis on two dims", lambda: step(pin={"0.weight": "[o:tp, i:tp]"}), "['tp'] more than once"),
    Wrong(
        "a pin for a name that is not there",
        lambda: step(pin={"0.wieght": "[o:tp, i]"}),
        "'0.wieght' names no parameter; '0.weight'",
    ),
    Wrong("a pin of a stage without a pipeline", lambda: step(pin={"0": "stage 1"}), "'stage 1'; no axis pp"),
    Wrong(
        "a pin of a stage that there is not",
        lambda: step(on=mesh(pp=2), micro_batches=2, schedule="1f1b", pin={"0": "stage 2"}),
        "'stage 2'; stages 1 to 1",
    ),
    Wrong(
        "a pin of a stage on a name that is not there",
        lambda: step(on=mesh(pp=2), pin={"nothing": "stage 1"}),
        "'nothing'; no module and no call of forward",
    ),
    Wrong(
        "a pin of a stage that leaves none before it",
        lambda: step(on=mesh(pp=2), pin={"0": "stage 1"}),
        "not in the order of forward, or leave a stage empty",
    ),
    Wrong(
        "memory= that no schedule fits",
        lambda: step(on=mesh(pp=2), memory=100),
        "memory=100; least peak found; too many, on rank; There stand; What would take less; more ranks",
    ),
    Wrong(
        "args= that is no tuple",
        lambda: mw.compile(mlp(), mesh(dp=2), args=torch.ones(4, 6)),  # type: ignore[arg-type]
        "args=; tuple; args=(x,)",
    ),
    Wrong("micro_batches=0", lambda: step(micro_batches=0), "micro_batches=0; at least 1"),
    Wrong("more micro-batches than rows", lambda: step(micro_batches=9), "batch of; micro_batches=9; fits"),
    Wrong(
        "a schedule that is none",
        lambda: step(on=mesh(pp=2), micro_batches=2, schedule="2f2b"),
        "schedule='2f2b'; 1f1b; zb-h1",
    ),
    Wrong(
        "a schedule for other ranks",
        lambda: step(on=mesh(pp=2), micro_batches=2, schedule="0: 0F0 0BW0"),
        "1 ranks; here are 2",
    ),
    Wrong(
        "a schedule without a backward",
        lambda: step(on=mesh(pp=2), micro_batches=2, schedule="forward-only"),
        "no backward; leave it out",
    ),
    Wrong(
        "a schedule that leaves something out",
        lambda: step(on=mesh(pp=2), micro_batches=1, schedule="0: 0F0 0BW0\n1: 1F0"),
        "cannot be followed; 1B0",
    ),
    Wrong(
        "collectives= that there are not",
        lambda: untouched(collectives="star"),
        "collectives='star'; 'ring'; 'hierarchical'; 'auto'",
    ),
    Wrong("zero=7", lambda: step(zero=7), "zero=7; 0, 1, 2, 3 or 'auto'"),
    Wrong("fuse=True", lambda: step(fuse=True), "fuse=True; 'auto', 'none' or 'all'"),
    Wrong("recompute=True", lambda: step(recompute=True), "recompute=True; 'auto', 'none' or 'full'; pin="),
    Wrong(
        "a pin of what is kept that names nothing",
        lambda: step(pin={"layer.*": "recompute"}),
        "the pin 'layer.*' names no module and no call; for example",
    ),
    Wrong(
        "recompute beside plan=",
        lambda: step(plan=step().plan, recompute="full"),
        "recompute='full' beside plan=; leave recompute= out",
    ),
    Wrong(
        "memory= that the model cannot fit", lambda: step(on=mesh(dp=2), memory=100), "memory=100; too many; more ranks"
    ),
    Wrong("memory= as text", lambda: step(memory="2GB"), "memory='2GB'; bytes; 2**30"),
    # saved plans
    Wrong("a plan text that is no plan", lambda: step(plan="hello"), "no saved plan; plan.to_text()"),
    Wrong("half a plan text", lambda: step(plan=HALF), "damaged; 'choices'; plan again"),
    Wrong(
        "a plan made for another mesh",
        lambda: step(on=mesh(tp=4), plan=plan_text()),
        "{'tp': 2}; {'tp': 4}; plan again",
    ),
    Wrong(
        "a plan of another program",
        lambda: step(nn.Linear(6, 4), plan=plan_text()),
        "another program; calls differ; plan again",
    ),
    Wrong("a plan of a model of other sizes", lambda: step(mlp(7), plan=plan_text()), "0.weight; [7, 6]; plan again"),
    Wrong("a number as the plan", lambda: step(plan=5), "plan.to_text(); not int"),
    # what is asked of a compiled model
    Wrong("backward twice", backward_twice, "once for each forward; call the model again"),
    Wrong("gather of another word", lambda: untouched().gather("nonsense"), "'params', 'grads' or 'buffers'"),
    Wrong("explain of an unknown name", lambda: step().explain("2.wieght"), "'2.wieght'; '0.weight'"),
    Wrong("the plan before there is one", lambda: untouched().plan, "no plan yet; first call; args="),
    Wrong(
        "parameters before they are placed",
        lambda: list(untouched().parameters()),
        "nothing is placed yet; step(); args=",
    ),
    Wrong(
        "load_state_dict with a wrong shape",
        lambda: load(lambda d: d.update({"0.weight": torch.ones(2, 2)})),
        "0.weight is (2, 2), should be (8, 6)",
    ),
    Wrong("load_state_dict with missing keys", lambda: load(lambda d: d.pop("0.weight")), "missing 0.weight"),
    Wrong("load_state_dict with unknown keys", lambda: load(lambda d: d.update(zz=torch.ones(1))), "unknown zz"),
]


TEXTS: dict[str, str] = {}


def error_of(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of the error; each wrong thing is done once."""
    if wrong.what not in TEXTS:
        TEXTS[wrong.what] = _raised(wrong, monkeypatch)
    return TEXTS[wrong.what]


def _raised(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in wrong.env:
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises((mw.MeshwrightError, ValueError)) as caught:
            wrong.do()
    finally:
        monkeypatch.undo()
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: re.sub(r"\W+", "-", w.what))
def test_the_error_names_the_fix(wrong: Wrong, monkeypatch: pytest.MonkeyPatch):
    text = error_of(wrong, monkeypatch)
    missing = [words for words in wrong.says.split("; ") if words not in text]
    assert not missing, f"{missing} not in: {text}"
    assert len(text) < 700


def test_every_fault_of_the_options_at_once():
    with pytest.raises(mw.PlanError) as caught:
        mw.compile(mlp(), mesh(), zero=7, memory=-1, seed=0.5, pin={"a": "b", "c": "[o:zz]"})  # type: ignore[arg-type]
    assert all(words in str(caught.value) for words in ("zero=7", "memory=-1", "seed=0.5", "pin 'a'", "pin 'c'"))


def test_load_state_dict_changes_nothing_when_it_fails():
    compiled = step()
    before = compiled.state_dict()
    with pytest.raises(mw.MeshwrightError):
        compiled.load_state_dict({"0.weight": torch.zeros(8, 6), "0.bias": torch.zeros(3)})
    assert all(torch.equal(v, compiled.state_dict()[k]) for k, v in before.items())


def test_a_checkpointed_region_with_dropout_keeps_one_mask():
    """torch.utils.checkpoint is captured without its second forward, so a mask cannot be drawn twice."""

    def region(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: F.dropout(t, 0.5), h, use_reentrant=False)  # type: ignore[return-value]

    compiled = mw.compile(Wilful(region), mesh(dp=2), loss=lambda o: o.sum())
    out = compiled(torch.ones(4, 6))
    out.sum().backward()
    kept = (out != 0).sum(0) * 2.0
    torch.testing.assert_close(compiled.gather("grads")["f.bias"], kept)


def test_the_page_lists_them(golden: Callable[[str, str], bool], monkeypatch: pytest.MonkeyPatch):
    rows = [(w.what, error_of(w, monkeypatch)) for w in WRONG]
    assert golden("docs/errors.md", PAGE_HEAD + "".join(f"| {what} | {_cell(text)} |\n" for what, text in rows))


def _cell(text: str) -> str:
    """One line, without what differs between machines and versions of torch."""
    text = re.sub(r"/\S*/(\w+\.py):\d+", r"\1:LINE", text.partition("\n")[0])
    text = re.sub(r"Could not guard on .*|\(Expecting.*?\)\)", "...)", text)
    return text.replace("|", "\\|")
