"""The solver: exact where it says so, a legal upper bound where it does not."""

import itertools

import numpy as np
import pytest
from meshwright.partitioner import elimination
from meshwright.partitioner import solve as solver
from meshwright.partitioner.elimination import Problem, Store, objective
from meshwright.partitioner.presolve import Presolved
from meshwright.partitioner.solve import solve


def random_problem(seed: int, variables: int = 6, choices: int = 4, density: float = 0.6) -> Problem:
    """Tables of numbers from few values, so that ties occur; some variables have one choice."""
    random = np.random.default_rng(seed)
    problem = Problem()
    sizes = random.integers(1, choices + 1, variables)
    for n in sizes:
        problem.variable(random.integers(0, 6, n).astype(float))
    for i, j in itertools.combinations(range(variables), 2):
        if random.random() < density:
            a, b = (i, j) if random.random() < 0.5 else (j, i)
            problem.pair(a, b, random.integers(0, 9, (sizes[a], sizes[b])).astype(float))
    return problem


def brute_force(problem: Problem) -> float:
    every = itertools.product(*(range(len(u)) for u in problem.unary))
    return min(objective(problem, list(values)) for values in every)


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 200, 50)], ids=str)
def test_equals_brute_force(seeds: range):
    for seed in seeds:
        problem = random_problem(seed, density=(seed % 5) / 4)
        found = solve(problem)
        assert found.exact
        assert found.cost == objective(problem, found.values) == brute_force(problem), f"seed {seed}"


def test_a_sum_too_large_to_be_held_gives_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elimination, "HELD", 1)
    for seed in range(50):
        problem = random_problem(seed, density=0.8)
        before = [u.copy() for u in problem.unary], {k: t.copy() for k, t in problem.pairs.items()}
        found = solve(problem)
        assert found.exact
        assert found.cost == brute_force(problem), f"seed {seed}"
        assert all(map(np.array_equal, before[0], problem.unary))
        assert all(np.array_equal(t, problem.pairs[k]) for k, t in before[1].items())


def test_other_variables_set_aside_in_turn_help(monkeypatch: pytest.MonkeyPatch):
    """Those first set aside stay at values that suit each other; with others set aside they move together."""
    monkeypatch.setattr(elimination, "LIMIT", 20)
    monkeypatch.setattr(solver, "WIDE", 20)
    monkeypatch.setattr(solver, "NODES", 0)
    cost = []
    for idle in (0, solver.IDLE):
        monkeypatch.setattr(solver, "IDLE", idle)
        problems = (random_problem(seed, density=0.9) for seed in range(100))
        cost.append([solver._with_aside(p, Store(), set()).cost for p in problems])
    assert all(a >= b for a, b in zip(*cost, strict=True))
    assert sum(a > b for a, b in zip(*cost, strict=True)) >= 5


def test_leaves_the_problem_as_it_was():
    problem = random_problem(3)
    before = [u.copy() for u in problem.unary], {k: t.copy() for k, t in problem.pairs.items()}
    solve(problem)
    assert all(map(np.array_equal, before[0], problem.unary))
    assert all(np.array_equal(t, problem.pairs[k]) for k, t in before[1].items())


@pytest.mark.parametrize(("limit", "nodes"), [(1, 0), (5, 0), (20, 0), (5, 60)])
def test_beyond_the_limit_it_is_a_legal_upper_bound(monkeypatch: pytest.MonkeyPatch, limit: int, nodes: int):
    monkeypatch.setattr(solver, "NODES", nodes)
    monkeypatch.setattr(elimination, "LIMIT", limit)
    monkeypatch.setattr(solver, "WIDE", limit)
    inexact, met = 0, 0
    for seed in range(100):
        problem = random_problem(seed, density=0.9)
        found, best = solve(problem), brute_force(problem)
        assert all(0 <= v < len(u) for v, u in zip(found.values, problem.unary, strict=True))
        assert found.cost == objective(problem, found.values)
        assert found.cost >= best
        assert found.cost == best or not found.exact, f"seed {seed} says exact: {found.cost}, the least is {best}"
        assert found.bound <= best, f"seed {seed} says that no choice costs less than {found.bound}: one costs {best}"
        inexact += not found.exact
        met += found.cost == best
    assert inexact > 10 or nodes
    assert met > 0


@pytest.mark.parametrize(("nodes", "least"), [(0, 100), (12, 120), (60, 150)])
def test_hubs_set_aside_leave_a_legal_answer_and_a_bound(monkeypatch: pytest.MonkeyPatch, nodes: int, least: int):
    """Some variables are fixed and bettered instead of eliminated: never below the least, and the bound never above.
    Branching on their values, where there are enough nodes, finds the least of all 150."""
    monkeypatch.setattr(solver, "NODES", nodes)
    met = 0
    for seed in range(150):
        problem = random_problem(seed, density=0.7)
        hubs, best = [seed % 6, (seed + 2) % 6], brute_force(problem)
        found = solver._with_hubs(problem, hubs, Store(), {seed % 6}, elimination.LIMIT)
        assert found.cost == objective(problem, found.values)
        assert found.bound <= best <= found.cost, f"seed {seed}"
        met += found.cost == best
    assert met >= least


def test_what_is_taken_out_beforehand_loses_nothing():
    """The least of what is left, with what was taken out, is the least; ties and dear pairs among the tables."""
    left = taken = 0
    for seed in range(200):
        problem = random_problem(seed, variables=7, choices=3, density=0.3 + (seed % 5) / 8)
        if seed % 4 == 0:
            problem.pairs = {k: np.where(t > 6, 1e9, t) for k, t in problem.pairs.items()}
        small = Presolved(problem, Store())
        cost = small.constant + brute_force(small.problem)
        values = small.values(solve(small.problem).values)
        assert cost == objective(problem, values) == brute_force(problem), f"seed {seed}"
        left += sum(map(len, small.problem.unary))
        taken += sum(map(len, problem.unary))
    assert 0 < left < taken / 2


def hubbed(layers: int) -> Problem:
    """Layers alike, each of three variables that two hubs join with each other and with the next layer."""
    random, problem = np.random.default_rng(1), Problem()
    hubs = [problem.variable(random.random(6)) for _ in range(2)]
    shapes = ((3, 9), (3, 9, 9), (3, 9, 9), (2, 9, 6))
    own, inner, across, to_hub = (list(random.random(s)) for s in shapes)  # equal tables are one object
    for n in range(layers):
        first = [problem.variable(u) for u in own]
        for k, (i, j) in enumerate(itertools.combinations(first, 2)):
            problem.pair(i, j, inner[k])
        for k, i in enumerate(first):
            problem.pair(i, hubs[k % 2], to_hub[k % 2])
            if n:
                problem.pair(i - 3, i, across[k])
    return problem


def test_layers_alike_are_presolved_once():
    done = []
    for layers in (8, 80):
        store = Store()
        Presolved(hubbed(layers), store)
        done.append(len(store.done))
    assert done[1] <= done[0] + 10


def test_equal_layers_are_solved_once():
    """A chain of the same two tables: the eliminations done grow with the logarithm of its length."""
    done = []
    for length in (32, 1024):
        problem, store = Problem(), Store()
        own, between = np.array([0.0, 1.0, 0.5]), np.array([[0.0, 2.0, 1.0], [2.0, 0.0, 3.0], [1.0, 3.0, 0.0]])
        for _ in range(length):
            problem.variable(own)
        for i in range(length - 1):
            problem.pair(i, i + 1, between)
        assert solve(problem, store).exact
        done.append(sum(isinstance(k[0], tuple) for k in store.done))
    assert done[1] <= done[0] + 40


def test_unreachable_pairs_are_avoided():
    """1e9 stands for a pair that cannot be joined; conditioning must not walk into one it could avoid."""
    problem = Problem()
    for _ in range(3):
        problem.variable(np.array([0.0, 5.0]))
    for i, j in ((0, 1), (1, 2), (0, 2)):
        problem.pair(i, j, np.array([[1e9, 1.0], [1.0, 1.0]]))
    found = solve(problem)
    assert found.exact
    assert found.cost == 13.0


@pytest.mark.parametrize("length", [1, 2, 3000])
def test_a_chain_of_any_length(length: int):
    """Thousands of layers in a row: no recursion, no large table."""
    random = np.random.default_rng(0)
    problem = Problem()
    for _ in range(length):
        problem.variable(random.random(3))
    for i in range(length - 1):
        problem.pair(i, i + 1, random.random((3, 3)))
    best = problem.unary[0]
    for i in range(1, length):
        best = (best[:, None] + problem.pairs[(i - 1, i)]).min(0) + problem.unary[i]
    found = solve(problem)
    assert found.exact
    assert found.cost == pytest.approx(best.min())


def test_nothing_to_decide():
    assert solve(Problem()).values == []
    problem = Problem()
    problem.variable(np.array([2.0]))
    problem.pair(0, 0, np.array([[3.0]]))
    assert solve(problem).cost == 5.0
