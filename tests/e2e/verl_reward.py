"""A reward that a freshly drawn model earns in different amounts: the share of digits among its letters."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return {"score": sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1), "acc": 0.0}
