"""Classes that only this module knows: pickles of them can't be understood by anyone who doesn't run Python."""


class Stranger:
    def __init__(self, seed):
        self.seed = seed
        self.words = {"a": [1, 2.5], "b": None}

    def __eq__(self, other):
        return type(other) is Stranger and self.__dict__ == other.__dict__

    def __repr__(self):
        return f"Stranger({self.seed})"
