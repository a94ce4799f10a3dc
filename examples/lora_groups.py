"""One frozen language model, and an adapter for each group of clients.

Twelve clients speak three dialects of one language. All have the same small GPT-2, which was
trained on the standard language and is frozen. FedAvg trains one adapter for all clients, Clade
finds the dialects and trains one adapter for each. Nothing is downloaded.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

import fedclade as fc

WORDS, LENGTH, DIALECTS, CLIENTS = 24, 8, 3, 12
torch.manual_seed(0)

# In the standard language each word has a usual next word. Each dialect changes it for half of the
# words.
standard = torch.randperm(WORDS)
dialects = []
for _ in range(DIALECTS):
    changed = torch.randperm(WORDS)[: WORDS // 2]
    dialect = standard.clone()
    dialect[changed] = standard[changed.roll(1)]
    dialects.append(dialect)


def sentences(follows: torch.Tensor, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sentences in which nine of ten words are the usual next word, and the next word of each."""
    words = [torch.randint(0, WORDS, (count,))]
    for _ in range(LENGTH):
        is_usual = torch.rand(count) < 0.9
        words.append(torch.where(is_usual, follows[words[-1]], torch.randint(0, WORDS, (count,))))
    text = torch.stack(words, 1)
    x = text[:, :-1]
    return {"input_ids": x, "attention_mask": torch.ones_like(x)}, text[:, 1:]


def new_base() -> GPT2LMHeadModel:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


# The base model: a moment of training on the standard language.
base = new_base()
optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
for _ in range(150):
    x, y = sentences(standard, 64)
    loss = F.cross_entropy(base(**x).logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

clients = fc.data.from_arrays(
    [
        (*sentences(dialects[client % DIALECTS], 60), *sentences(dialects[client % DIALECTS], 40))
        for client in range(CLIENTS)
    ]
)
weights = {name: value.clone() for name, value in base.state_dict().items()}
model = fc.models.from_transformers(base, fc.LoRA(r=4, targets=("c_attn", "c_fc", "c_proj")))

folder = Path(tempfile.mkdtemp())
for method in (fc.FedAvg(), fc.Clade()):
    result = fc.run(
        method,
        clients,
        model,
        rounds=15,
        clients_per_round=1.0,
        epochs=2,
        lr=0.01,
        optimizer="adam",
        out=folder / method.name,
    )
    print(f"{method.name}: next word right {result.summary['accuracy']:.1f} %")

print(f"the groups that Clade found: {result.clusters.tolist()}")
sent = result.history[-1]["bytes_up"] / CLIENTS
every = sum(value.nbytes for value in model.parameters())
print(
    f"a client sends {sent / 1024:.0f} KiB in a round, the whole model has {every / 1024:.0f} KiB"
)

# Each group's adapter is a folder that peft loads.
exported = fc.export(result, folder / "adapters", ["safetensors"])
own_base = new_base()
own_base.load_state_dict(weights)
loaded = PeftModel.from_pretrained(own_base, exported.folder / exported.cards[0]["name"]).eval()
x, _ = sentences(dialects[0], 5)
client = exported.cards[0]["clients"][0]
with torch.no_grad():
    difference = (loaded(**x).logits - result.model_of(client)(**x).logits).abs().max()
print(f"{exported.cards[0]['name']} in peft: outputs differ by at most {difference:.0e}")
