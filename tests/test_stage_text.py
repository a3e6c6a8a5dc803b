"""What summary, explain and diff say of micro-batches and stages."""

from test_saved_pipelines import compiled


def test_summary_explain_and_diff_tell_of_stages():
    made, _ = compiled("twice", {"pp": 2}, 3, micro_batches=3, schedule="1f1b")
    plan = made.plan
    assert plan.stages is not None
    said = plan.summary()
    assert "a step goes through 3 micro-batches in 1 loop\nstages\n  0 on pipeline rank 0: " in said
    assert "schedule 1f1b\n  rank 0 | F0 F1 .  .  BW0   F2" in said
    assert " of compute; " in said and " parameters, " in said
    cut = plan.stages.cuts[0]
    assert f"stage 1 on pipeline rank 1, which starts with {cut}; it is that call" in plan.explain(cut)
    other, _ = compiled("twice", {"dp": 1}, 3)
    lines = plan.diff(other.plan).splitlines()
    assert "micro-batches: 3 -> 1" in lines and "schedule: 1f1b -> none" in lines
    assert f"stages start with: {cut} -> none" in lines
    assert plan.diff(plan) == ""
