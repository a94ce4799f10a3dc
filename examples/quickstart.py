"""Compare one model for all clients, one model per client and one model per group, on clients that
are in groups. Runs in seconds.
"""

import fedclade as fc

clients = fc.data.partition(
    fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), clients=50, seed=0
)
print(clients.describe())

for method in (fc.FedAvg(), fc.Local(), fc.Clade()):
    result = fc.run(
        method, clients, model=fc.models.MLP(64), rounds=20, clients_per_round=0.5, lr=0.1, epochs=2
    )
    summary = result.summary
    print(
        f"{method.title}: {summary['accuracy']:.1f} % (worst tenth"
        f" {summary['accuracy_worst10']:.1f} %)"
    )

model = result.model_of(7)  # a plain nn.Module
print("client 7 predicts", model(clients.x[:5]).argmax(1).tolist())
