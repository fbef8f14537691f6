"""`minidist estimate`: memory, traffic and FLOPs of every rank, computed from the configuration; imports no torch.

Read in this order:

* `layout`: which layers and which samples each rank has; `shapes`: tensor shapes as formulas.
* `saved_tensors`: the tensors that autograd saves for backward; `activations`: their bytes, and their peak in a step.
* `states`: parameters, gradients and optimizer states; `gradient_reduction` and `shards`: buckets and ZeRO's flat
  parameters; `traffic`: the bytes that each rank sends.
* `backward_events`, `temporary_buffers` and `peak_memory`: the peak of all tensors together; `shared_memory`: the
  shared-memory segments of the shm backend; `checkpoint_copies`: the host memory of saves in the background.
* `flops`: FLOPs, utilisation (MFU, HFU) and the pipeline's bubble.
* `estimate` puts it all together; `command` prints it. `parameter_count` (model states from a parameter count alone)
  and `gpt` (the published GPT block) are the command's other two modes. `goodput`: how often to save; `failures`: its
  options.
"""
