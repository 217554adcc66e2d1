"""A training script as a user writes it: the five lines that lastgasp needs are marked.

A small transformer learns Shakespeare's sonnets by character, with dropout, AdamW, warm-up and
cosine, and shuffled data. For the demo it also logs what it did, one JSON line a step.
"""

import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trainer_sdk  # 1
from trainer_sdk.data import ResumableSampler  # 2: a shuffled order that can be continued

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16
EPOCHS = int(os.environ.get("DEMO_EPOCHS", "3"))
PACE_S = float(os.environ.get("DEMO_PACE_S", "0"))


class Characters(Dataset):
    """Windows of the text, each with the same window one character further."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.vocabulary = sorted(set(text))
        index = {character: number for number, character in enumerate(self.vocabulary)}
        self.data = torch.tensor([index[character] for character in text])

    def __len__(self) -> int:
        return (len(self.data) - CONTEXT - 1) // 4

    def __getitem__(self, item: int):
        window = self.data[4 * item : 4 * item + CONTEXT + 1]
        return item, window[:-1], window[1:]


class Transformer(nn.Module):
    """Decoder-only, with the embedding tied to the output."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.position
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def warm_up_and_cosine(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * min(step, 200) / 200))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = Characters(Path(__file__).with_name("text.txt"))
    model = DistributedDataParallel(Transformer(len(data.vocabulary)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
    loader = DataLoader(data, batch_size=BATCH, sampler=ResumableSampler(data, seed=1))
    log_path = Path(os.environ["DEMO_LOG"]) / f"rank-{rank}.jsonl"

    with (
        open(log_path, "a", buffering=1) as log,
        trainer_sdk.attach(  # 3
            model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=loader
        ) as run,
    ):
        receipt = run.restore()  # 4
        if rank == 0 and receipt.step:
            print(receipt, flush=True)
        for epoch in run.epochs(EPOCHS):
            for items, tokens, targets in loader:
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                time.sleep(PACE_S)
                line = {
                    "step": run.global_step + 1,
                    "epoch": epoch,
                    "samples": items.tolist(),
                    "loss": loss.item().hex(),
                    "lr": scheduler.get_last_lr()[0].hex(),
                    "weights": checksum(model),
                }
                log.write(json.dumps(line) + "\n")
                run.step()  # 5
    dist.destroy_process_group()


def checksum(model: nn.Module) -> str:
    """All bits of all weights in one number."""
    total = 0
    for parameter in model.parameters():
        bits = parameter.detach().view(torch.int32).to(torch.int64)
        total = (total * 31 + int(bits.sum())) % (1 << 64)
    return f"{total:016x}"


if __name__ == "__main__":
    main()
