"""`compiled.dump` of programs with micro-batches and stages."""

from pathlib import Path

from meshwright.partitioner.schedules.schedule import from_text
from test_saved_pipelines import compiled


def test_dump_writes_segments_acts_and_the_schedule(tmp_path: Path):
    made, _ = compiled("twice", {"pp": 2}, 3, micro_batches=3, schedule="1f1b")
    made.dump(tmp_path)
    files = {p.name: p.read_text() for p in tmp_path.iterdir()}
    text, rows = files["schedule.txt"].split("\n\n")
    assert from_text(text) == made.plan.schedule
    assert rows == "rank 0 | F0 F1 .  .  BW0   F2 BW1   .  BW2\nrank 1 | .  F0 BW0   F1 BW1   F2 BW2   .  .\n"
    acts = files["acts.txt"]
    assert acts.startswith("rank 0\n") and "\nrank 1\n" in acts
    assert "  0 phase 1 stage 0 F\n  0 send " in acts and " -> stage rank 1\n" in acts
    assert "  2 phase 1 stage 1 BW\n" in acts and " <- stage rank 0\n" in acts
    for name in ("rank0_phase_1_stage_0_F.py", "rank1_phase_1_stage_1_BW.py"):
        assert "def rank" in files[name], sorted(files)
    assert any(name.startswith("6_phase_1_stage_0_F") for name in files)


def test_dump_of_micro_batches_alone(tmp_path: Path):
    made, _ = compiled("twice", {"dp": 2}, 2, micro_batches=2)
    made.dump(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert "acts.txt" in names and "schedule.txt" not in names and "rank1_phase_1.py" in names
