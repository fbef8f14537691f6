"""A reference for pipeline timing that shares no code with the package: longest paths, by recursion."""


class Deadlock(Exception):
    """An operation waits for itself."""


def model_part(stage, chunk, stages, placement):
    """Position in the model of a stage's chunk, from the list of (stage, chunk) in the order of the forward pass."""
    chunks = chunk + 1
    rows = [list(range(stages)) for _ in range(chunks)]
    if placement == "v":
        rows = [row[::-1] if number % 2 else row for number, row in enumerate(rows)]
    return [(s, c) for c, row in enumerate(rows) for s in row].index((stage, chunk))


def longest_paths(orders, duration_of, comm=0.0, placement="loop", carried=lambda kind, micro_batch, stage: True):
    """{(kind, micro_batch, part): (start, end)} of all operations.

    orders: for every stage a list of (kind, micro-batch, chunk). duration_of(kind, part): seconds. carried: whether an
    operation waits for the transfer from another stage. Raises Deadlock.
    """
    stages = len(orders)
    part_of = {(s, c): model_part(s, c, stages, placement) for s in range(stages) for c in {op[2] for op in orders[s]}}
    stage_of = {p: stage for (stage, _), p in part_of.items()}
    before = {}
    for stage, order in enumerate(orders):
        keys = [(kind, m, part_of[stage, c]) for kind, m, c in order]
        before.update(zip(keys, [None, *keys[:-1]], strict=True))
    known, open_ = {}, set()

    def end(key):
        return times(key)[1]

    def times(key):
        if key not in known:
            if key in open_:
                raise Deadlock(key)
            open_.add(key)
            kind, m, p = key
            at = [0.0] if before[key] is None else [end(before[key])]
            if kind == "W":
                at.append(end(("B", m, p)))
            if kind == "B":
                at.append(end(("F", m, p)))
            source = {"F": ("F", m, p - 1), "B": ("B", m, p + 1)}.get(kind)
            if source in before and (stage_of[source[2]] == stage_of[p] or carried(kind, m, stage_of[p])):
                at.append(end(source) + (comm if stage_of[source[2]] != stage_of[p] else 0.0))
            known[key] = (max(at), max(at) + duration_of(kind, p))
        return known[key]

    for key in before:
        times(key)
    return known


def longest_stage_span(orders, known, placement="loop"):
    """The longest time that a stage takes from its first start to its last end."""
    stages = len(orders)
    spans = [
        [known[kind, m, model_part(stage, c, stages, placement)] for kind, m, c in order]
        for stage, order in enumerate(orders)
    ]
    return max(span[-1][1] - span[0][0] for span in spans)
