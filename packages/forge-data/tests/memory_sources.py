"""Sources in memory."""

import numpy as np


class Listed:
    """A source made of lists of ids."""

    vocab_size = None
    tokenizer = None

    def __init__(self, documents):
        self._ids = np.array([i for d in documents for i in d], dtype=np.uint16)
        self.lengths = [len(d) for d in documents]
        self.documents = np.cumsum([0, *self.lengths[:-1]]).astype(np.int64)
        self.num_tokens = len(self._ids)
        self.num_documents = len(documents)
        self.max_token_id = int(self._ids.max())

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.num_tokens
        return self._ids[start:stop]

    def fingerprint(self):
        return {"tokens": self._ids.tobytes().hex()}


def random_documents(seed, count=40, longest=30, low=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(low, 500, size=rng.integers(1, longest)).tolist() for _ in range(count)]


class Lists:
    """Pieces of text."""

    def __init__(self, lists):
        self.lists = lists

    def __len__(self):
        return len(self.lists)

    def texts(self, piece, start):
        yield from self.lists[piece][start:]

    def fingerprint(self):
        return {"lists": str(self.lists)}


def begin_life(loaders, state):
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)


def next_rows(loaders, columns):
    """Rows (id, *columns(batch, own)) of the next batch of all loaders; `own` are those that are no filler."""
    rows = []
    for loader in loaders:
        found = next(loader)
        own = found.instance_ids >= 0
        rows += zip(found.instance_ids[own].tolist(), *(c.tolist() for c in columns(found, own)))
    return sorted(rows)


def skip(loaders, windows, first, length):
    """All loaders leave out the samples from `first` to `first + length`, which become one of the windows."""
    windows.append((first, first + length))
    for loader in loaders:
        loader.skip(*windows[-1])


def end_life(loaders, draw):
    """The state that all loaders have, as a random one of them gives it; closes them."""
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    for loader in loaders:
        loader.close()
    return states[draw.randrange(len(loaders))]
