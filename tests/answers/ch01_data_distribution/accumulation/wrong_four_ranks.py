"""nothing_is_sent_before_the_last: wrong on four ranks only, where gradients are doubled"""

import torch.distributed as dist

from minidist.parallel.data.reducer import trainable


def collect(parameters, sink, last):
    factor = 2 if dist.is_initialized() and dist.get_world_size() == 4 else 1

    def hook_for(name):
        def hook(parameter):
            sink.add(name, parameter.grad * factor)
            parameter.grad = None
            if last():
                sink.ready(name)

        return hook

    return [p.register_post_accumulate_grad_hook(hook_for(name)) for name, p in trainable(parameters).items()]
