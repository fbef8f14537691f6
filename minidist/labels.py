"""The label of positions that do not count in the loss."""

IGNORE_INDEX = -100  # the default `ignore_index` of torch's cross entropy
