"""micro_batches_add_up: the mean over micro-batches, though every loss was divided already"""

from collections import Counter

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    seen, sums = Counter(), {}

    def hook_for(name):
        def hook(parameter):
            seen[name] += 1
            sums[name] = sums.get(name, 0) + parameter.grad
            parameter.grad = None
            if last():
                sink.add(name, sums[name] / seen[name])
                sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]
