"""FSDP2 on several processes: every rank holds a part of each layer, and of the optimizer's state.

    torchrun --nproc-per-node 2 FILE

On CPUs here, with gloo; on GPUs take `nccl`, and move model and data to the rank's device.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wngrad import WNMuon


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same model on every rank …
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = WNMuon(model)  # after sharding, as with every optimizer
    torch.manual_seed(1 + dist.get_rank())  # … and other data
    for step in range(101):
        x = torch.randn(64, 16)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        opt.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.3f}", flush=True)
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads need Python to let go of the last tensors, or they abort


if __name__ == "__main__":
    main()
