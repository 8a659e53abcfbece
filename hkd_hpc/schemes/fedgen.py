"""FedGen: Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.

The server trains a generator G(noise, y) of latent vectors from the clients' classifier heads h_i and label counts:

    min_G  mean_B sum_i w_i(y) CE(h_i(G(y)), y) + exp(-mean pairs (noise distance * latent distance)),
    w_i(y) = share of the images of class y that client i holds

A client adds, from round 2 on, with alpha and beta decaying by `decay` a round:

    alpha * (generated / batch) * CE(h(G(y')), y') + beta * KL( softmax(h(G(y))) || softmax(z) )

y' drawn evenly from the labels that the federation holds (by the last report of each client that has sent one), y the
batch's own labels. generated / batch is generator_batch / train.batch_size, a constant, as in its code and in the
FedHKD paper's appendix (.5): a short last batch, which that code does not make, has no other weight.

This is FedGen's code, which the FedHKD paper follows. FedGen's paper (section 4) says otherwise, and `form=paper` does
so: noise from N(0, I), not U(0, 1); labels drawn in proportion to their counts; the generator's first term is the
cross-entropy of the heads' mean logits; a client draws as many vectors as its batch has images. Its client has no
second term and takes the first with weight 1, which are beta = 0, alpha = 1 and decay = 1 (preset fedgen-paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.models.precision import real
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.traffic import Formula, RunTraffic

BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class FedGenSettings(SchemeSettings):
    """Defaults: the FedHKD paper's appendix; the generator's optimiser as in FedGen's code. alpha = beta = 0 is
    FedAvg.
    """

    name: str = setting("fedgen", "the scheme")
    alpha: float = setting(10.0, "weight of the cross-entropy on generated latent vectors", low=0, high=1e6)
    beta: float = setting(10.0, "weight of the divergence from the prediction on generated vectors", low=0, high=1e6)
    decay: float = setting(0.98, "factor of alpha, beta and the generator's learning rate a round", above=0, high=1)
    form: str = setting(
        "code", "FedGen's code or FedGen's paper, for noise, labels and the generator's loss", choices=("code", "paper")
    )
    noise_size: int = setting(64, "size of the generator's noise", low=1, high=100_000)
    hidden: int = setting(512, "hidden units of the generator", low=1, high=100_000)
    generator_epochs: int = setting(5, "epochs of the generator a round", low=1, high=10_000)
    generator_steps: int = setting(10, "batches in an epoch of the generator", low=1, high=10_000)
    generator_batch: int = setting(
        32, "generated vectors a batch, on the server and on the clients", low=2, high=100_000
    )
    generator_lr: float = setting(3e-4, "Adam's learning rate for the generator", above=0, high=10)
    weight_decay: float = setting(0.01, "L2 weight decay of the generator", low=0, high=10)


def generator_floats(of: RunTraffic) -> int:
    """Noise and label to hidden, with bias and BatchNorm's scale and shift; hidden to latent, with bias."""
    hidden, noise = (int(of.settings[f"scheme.{key}"]) for key in ("hidden", "noise_size"))
    return hidden * (noise + of.classes + 3) + of.latent * (hidden + 1)


class FedGen(Scheme):
    """A generator in latent space; it travels down, heads and label counts travel up."""

    Settings = FedGenSettings
    terms = ("cross_entropy", "generated", "divergence")
    # one value for both; 10: its code and the FedHKD paper, 1: its paper's objective; the rest of the grid is ours
    about = About(
        tunes={"alpha": (0.1, 1.0, 3.0, 10.0, 30.0), "beta": (0.1, 1.0, 3.0, 10.0, 30.0)},
        slowdown=(1.20, 1.21),
        formula=Formula(
            "up C, down the generator",
            lambda of: of.delivering_R * of.classes,
            lambda of: of.sampled_R * generator_floats(of),
        ),
    )
    cuda_graph_safe = False  # noise and labels are drawn in each batch

    def __init__(self, settings, info):
        super().__init__(settings, info)
        own_parameters = sum(map(math.prod, self.generator_shapes().values()))
        self.about = replace(self.about, own_parameters=own_parameters)

    # --- what travels

    def generator_shapes(self):
        s, info = self.settings, self.info
        return {
            "weight1": (s.hidden, s.noise_size + info.classes),
            "bias1": (s.hidden,),
            "scale": (s.hidden,),
            "shift": (s.hidden,),
            "weight2": (info.latent, s.hidden),
            "bias2": (info.latent,),
        }

    def report_shapes(self):
        classes, latent = self.info.classes, self.info.latent
        return {"count_C": (classes,), "head_CD": (classes, latent), "head_bias_C": (classes,)}

    def message_shapes(self):
        hidden = (self.settings.hidden,)
        return {"count_C": (self.info.classes,), **self.generator_shapes(), "mean": hidden, "variance": hidden}

    def traffic(self, tensors, direction):
        if direction == "up":
            return self.info.classes  # the head is part of the weights, which the paper counts already
        return sum(tensors[name].numel() for name in self.generator_shapes())

    def check_net(self, net):
        head = net.classifier
        if not isinstance(head, torch.nn.Linear) or head.bias is None:
            raise UsageError("scheme.name=fedgen: the `classifier` of model.name must be a torch.nn.Linear with bias")

    # --- on the clients

    def begin(self, client):
        client.cache["factor"] = self.settings.decay ** (client.round - 1)
        client.cache["random"] = client.random("generated vectors")
        client.cache["labels"], client.cache["law"] = label_law(self.settings.form, client.message["count_C"])

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        nothing = torch.zeros((), device=logits_BC.device)
        terms = {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B), "generated": nothing, "divergence": nothing}
        if client.cache["labels"] and self.settings.alpha:
            terms["generated"] = self._generated_term(client, len(batch.y_B))
        if client.cache["labels"] and self.settings.beta:
            terms["divergence"] = self._divergence_term(client, logits_BC, batch.y_B)
        return terms

    def _generated_term(self, client, size):
        s, cache = self.settings, client.cache
        count, ratio = (
            (size, 1.0) if s.form == "paper" else (s.generator_batch, s.generator_batch / self.info.batch_size)
        )
        y_B = torch.from_numpy(cache["random"].choice(cache["labels"], count, p=cache["law"])).to(client.y_train.device)
        logits_BC = client.net.classifier(self._generate_for(client, y_B))
        return s.alpha * cache["factor"] * ratio * F.cross_entropy(logits_BC, y_B)

    def _divergence_term(self, client, logits_BC, y_B):
        target_BC = F.softmax(client.net.classifier(self._generate_for(client, y_B)), dim=1).detach()
        divergence = F.kl_div(F.log_softmax(logits_BC, dim=1), target_BC, reduction="batchmean")
        return self.settings.beta * client.cache["factor"] * divergence

    def _generate_for(self, client, y_B):
        noise_BN = self._noise(client.cache["random"], len(y_B)).to(y_B.device)
        return generate(client.message, noise_BN, y_B, self.info.classes, training=False)

    def _noise(self, random, size):
        draw = random.standard_normal if self.settings.form == "paper" else random.random
        return real(torch.from_numpy(draw((size, self.settings.noise_size), "float32")))

    def report(self, client):
        count_C = real(torch.bincount(client.y_train, minlength=self.info.classes))
        head = client.net.classifier
        return {"count_C": count_C, "head_CD": head.weight.detach().clone(), "head_bias_C": head.bias.detach().clone()}

    # --- on the server

    def combine(self, server, reports):
        state, random = server.state, server.random("generator")
        if not state:
            state.update(self._new_generator(random))
        state.setdefault("count_MC", torch.zeros(self.info.clients, self.info.classes))
        state["count_MC"][server.client_ids] = reports["count_C"]
        lr = self.settings.generator_lr * self.settings.decay ** (server.round - 1)
        for _ in range(self.settings.generator_epochs * self.settings.generator_steps):
            self._generator_step(state, reports, random, lr)
        kept = {name: state[name] for name in self.message_shapes() if name != "count_C"}
        return {"count_C": state["count_MC"].sum(0), **kept}

    def _new_generator(self, random):
        """torch's initial Linear weights (uniform within 1 / sqrt(inputs)), BatchNorm at scale 1; Adam at zero."""
        shapes, state = self.generator_shapes(), {}
        for name, shape in shapes.items():
            inputs = shapes["weight1" if name == "bias1" else "weight2" if name == "bias2" else name][-1]
            state[name] = real(torch.from_numpy(random.uniform(-1, 1, shape))) / inputs**0.5
        state["scale"], state["shift"] = torch.ones(shapes["scale"]), torch.zeros(shapes["shift"])
        state["mean"], state["variance"] = torch.zeros(shapes["scale"]), torch.ones(shapes["scale"])
        for name, shape in shapes.items():
            state[f"adam_mean_{name}"], state[f"adam_square_{name}"] = torch.zeros(shape), torch.zeros(shape)
        state["adam_steps"] = torch.zeros(())
        return state

    def _generator_step(self, state, reports, random, lr):
        names = list(self.generator_shapes())
        parameters = {name: state[name].detach().requires_grad_() for name in names}
        labels, law = label_law(self.settings.form, reports["count_C"].sum(0))
        y_B = torch.from_numpy(random.choice(labels, self.settings.generator_batch, p=law))
        noise_BN = self._noise(random, len(y_B))
        latent_BD = generate({**state, **parameters}, noise_BN, y_B, self.info.classes, training=True)
        teach = ensemble_loss if self.settings.form == "paper" else teacher_loss
        loss = teach(latent_BD, y_B, reports) + diversity_loss(noise_BN, latent_BD)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        state["adam_steps"] += 1
        adam_step(state, dict(zip(names, gradients)), lr, self.settings.weight_decay)


def generate(parameters, noise_BN, y_B, classes, training):
    """Latent vectors (B, D): [noise, one-hot y] -> Linear, BatchNorm, ReLU -> Linear."""
    x_BX = torch.cat([noise_BN, real(F.one_hot(y_B, classes))], dim=1)
    hidden_BH = F.linear(x_BX, parameters["weight1"], parameters["bias1"])
    hidden_BH = F.batch_norm(
        hidden_BH,
        parameters["mean"],
        parameters["variance"],
        parameters["scale"],
        parameters["shift"],
        training=training,
    )
    return F.linear(F.relu(hidden_BH), parameters["weight2"], parameters["bias2"])


def teacher_loss(latent_BD, y_B, reports):
    """Mean over the batch of sum_i w_i(y) CE(h_i(latent), y): label weights act on every vector by itself."""
    logits_MBC = torch.einsum("bd,mcd->mbc", latent_BD, reports["head_CD"]) + reports["head_bias_C"][:, None]
    entropy_MB = -F.log_softmax(logits_MBC, dim=2)[:, torch.arange(len(y_B)), y_B]
    share_MC = reports["count_C"] / reports["count_C"].sum(0).clamp(min=1.0)
    return (share_MC[:, y_B] * entropy_MB).sum(0).mean()


def ensemble_loss(latent_BD, y_B, reports):
    """FedGen's paper: mean over the batch of the cross-entropy of the heads' mean logits."""
    logits_BC = latent_BD @ reports["head_CD"].mean(0).T + reports["head_bias_C"].mean(0)
    return F.cross_entropy(logits_BC, y_B)


def label_law(form, count_C):
    """(labels that somebody holds, their probabilities): paper: by their counts; code: None, which is evenly."""
    labels = torch.nonzero(count_C > 0)[:, 0].tolist()
    count = count_C.double().cpu().numpy()[labels]
    return labels, count / count.sum() if form == "paper" else None


def diversity_loss(noise_BN, latent_BD):
    """exp(-mean over pairs of (mean squared noise distance * mean absolute latent distance)): 1 when G ignores the
    noise.
    """
    noise_BB = (noise_BN[:, None] - noise_BN[None]).square().mean(2)
    latent_BB = (latent_BD[:, None] - latent_BD[None]).abs().mean(2)
    return torch.exp(-(noise_BB * latent_BB).mean())


def adam_step(state, gradients, lr, weight_decay):
    """torch.optim.Adam's step with L2 weight decay, on tensors by name."""
    steps = float(state["adam_steps"])
    for name, gradient in gradients.items():
        gradient = gradient + weight_decay * state[name]
        mean, square = state[f"adam_mean_{name}"], state[f"adam_square_{name}"]
        mean.lerp_(gradient, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        denominator = (square / (1 - BETAS[1] ** steps)).sqrt().add_(EPS)
        state[name] = state[name] - lr / (1 - BETAS[0] ** steps) * mean / denominator
