"""Whole rounds of every scheme in plain NumPy float64, from the papers' formulas: a second opinion on the product.

Nothing of the product is used but its named random streams, which are part of what it promises. No backward pass is
written either: the derivative of a loss L by weight p is Im L(w + i h e_p) / h, exact to rounding at h = 1e-30 (Squire
and Trapp, SIAM Review 1998), for all p at once along a leading axis P. `constant` cuts a derivative off. All functions
must be analytic: an absolute value or a ReLU looks at the real part.

Shape letters: B batch, N images of a client, C classes, D latent size, P parameters, A public images, K known classes,
M clients, I and O channels in and out, H height, W width, X pixels; "..." is P or nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hkd_hpc.common import rng

SEED, EPOCHS, BATCH, LR = 0, 3, 8, 0.01
CLASSES, LATENT = 4, 5
STEP = 1e-30


def constant(x):
    """The value without its derivative."""
    return np.real(x)


def derivative(loss, w_P, *more):
    """(values, gradient_P of their sum) of a function of weights (..., P) that gives a dict of scalars (...)."""
    terms = loss(w_P + 1j * STEP * np.eye(len(w_P)), *more)
    values = {name: float(np.ravel(constant(term))[0]) for name, term in terms.items()}
    return values, np.imag(sum(terms.values())) / STEP


# ---- functions


def relu(x):
    return np.where(constant(x) > 0, x, 0)


def linear(x, weight, bias):
    return x @ weight.swapaxes(-1, -2) + bias[..., None, :]


def log_softmax(z):
    z = z - constant(z).max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def softmax(z):
    return np.exp(log_softmax(z))


def cross_entropy(z_BC, y_B):
    return -log_softmax(z_BC)[..., np.arange(len(y_B)), y_B].mean(-1)


def norm(x):
    return np.sqrt((x * x).sum(-1))


def cosine(a, b):
    return (a * b).sum(-1) / (norm(a) * norm(b))


def batch_norm(x, scale, shift, running=None):
    """(output, (mean, unbiased variance) of this batch) of x (..., rows, channels); `running`: those of eval mode."""
    rows, mean = x.shape[-2], x.mean(-2)
    variance = ((x - mean[..., None, :]) ** 2).mean(-2)
    used_mean, used_variance = (mean, variance) if running is None else running
    normal = (x - used_mean[..., None, :]) / np.sqrt(used_variance[..., None, :] + 1e-5)
    return normal * scale[..., None, :] + shift[..., None, :], (mean, variance * rows / (rows - 1))


def running_mean(old, new):
    """BatchNorm's momentum of .1."""
    return 0.9 * old + 0.1 * new


def convolution(x_BHWI, weight_OI33, stride):
    """3 x 3, padding 1, no bias, tap by tap; channels last; both may have the axis P in front."""
    batch, height, width = x_BHWI.shape[-4], *(-(-size // stride) for size in x_BHWI.shape[-3:-1])
    padded = np.pad(x_BHWI, [(0, 0)] * (x_BHWI.ndim - 3) + [(1, 1), (1, 1), (0, 0)])
    out = 0
    for i in range(3):
        for j in range(3):
            tap = padded[..., i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride, :]
            rows = tap.reshape(*tap.shape[:-4], -1, tap.shape[-1])
            out = out + rows @ weight_OI33[..., i, j].swapaxes(-1, -2)
    return out.reshape(*out.shape[:-2], batch, height, width, -1)


def pooled(x_BCHW, side):
    """Means over equal cells: (B, C, side, side)."""
    cells, (height, width) = x_BCHW.shape[:2], x_BCHW.shape[2:]
    return x_BCHW.reshape(*cells, side, height // side, side, width // side).mean((3, 5))


def split(vector, shapes: dict) -> dict:
    """{name: (..., *shape)} of vectors (..., P) in which the tensors of these shapes lie one after the other."""
    parts, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        parts[name] = vector[..., start : start + size].reshape(*vector.shape[:-1], *shape)
        start += size
    return parts


def join(parts: dict, shapes: dict):
    return np.concatenate([np.ravel(parts[name]).astype(float) for name in shapes])


# ---- two networks. forward(w, x, statistics): (feature, logits, statistics of this batch); none given: train mode


class Dense:
    """Pixels pooled to 2 x 2, Linear, BatchNorm, ReLU, Linear; a classifier."""

    shapes = {
        "extractor.2.weight": (8, 12),
        "extractor.3.weight": (8,),
        "extractor.3.bias": (8,),
        "extractor.5.weight": (LATENT, 8),
        "extractor.5.bias": (LATENT,),
        "classifier.weight": (CLASSES, LATENT),
        "classifier.bias": (CLASSES,),
    }
    statistics = {"extractor.3.running_mean": (8,), "extractor.3.running_var": (8,)}

    def forward(self, w, x_BCHW, statistics=None):
        first, scale, shift, second, bias, *_ = split(w, self.shapes).values()
        x_BX = pooled(x_BCHW, 2).reshape(len(x_BCHW), -1) @ first.swapaxes(-1, -2)
        running = None if statistics is None else (statistics[:8], statistics[8:])
        x_BX, batch = batch_norm(x_BX, scale, shift, running)
        feature_BD = linear(relu(x_BX), second, bias)
        return feature_BD, self.classify(w, feature_BD), np.concatenate(batch, -1)

    def classify(self, w, feature_BD):
        parts = split(w, self.shapes)
        return linear(feature_BD, parts["classifier.weight"], parts["classifier.bias"])


class Convolutional(Dense):
    """Pooled to 4 x 4, convolution, ReLU; last stage (convolution, BatchNorm, ReLU); mean, Linear; a classifier."""

    shapes = {
        "extractor.first.0.weight": (4, 3, 3, 3),
        "extractor.last_stage.0.weight": (8, 4, 3, 3),
        "extractor.last_stage.1.weight": (8,),
        "extractor.last_stage.1.bias": (8,),
        "extractor.fc.weight": (LATENT, 8),
        "extractor.fc.bias": (LATENT,),
        "classifier.weight": (CLASSES, LATENT),
        "classifier.bias": (CLASSES,),
    }
    statistics = {"extractor.last_stage.1.running_mean": (8,), "extractor.last_stage.1.running_var": (8,)}

    def forward(self, w, x_BCHW, statistics=None):
        running = None if statistics is None else (statistics[:8], statistics[8:])
        _, out_BHWO, batch = self.maps(w, x_BCHW, running)
        parts = split(w, self.shapes)
        feature_BD = linear(out_BHWO.mean((-3, -2)), parts["extractor.fc.weight"], parts["extractor.fc.bias"])
        return feature_BD, self.classify(w, feature_BD), np.concatenate(batch, -1)

    def maps(self, w, x_BCHW, running=None):
        """(input, output, batch statistics) of the last stage, channels last."""
        first = split(w, self.shapes)["extractor.first.0.weight"]
        in_BHWI = relu(convolution(pooled(x_BCHW, 4).transpose(0, 2, 3, 1), first, 1))
        return in_BHWI, *self.last_stage(w, in_BHWI, 8, running)

    def last_stage(self, w, in_BHWI, channels, running=None):
        """Its first output channels, on the first input channels that are given."""
        _, weight, scale, shift, *_ = split(w, self.shapes).values()
        out = convolution(in_BHWI, weight[..., :channels, : in_BHWI.shape[-1], :, :], 2)
        rows = out.reshape(*out.shape[:-4], -1, channels)
        normal, batch = batch_norm(rows, scale[..., :channels], shift[..., :channels], running)
        return relu(normal).reshape(out.shape), batch


# ---- a client, its local training, a round


class Client:
    """What one client has; `model` is its own after its last local training: (w_P, statistics); `control`: SCAFFOLD."""

    def __init__(self, id: int, x_uint8, y_N, x_test, y_test):
        self.id, self.x, self.y = id, images(x_uint8), y_N
        self.x_test, self.y_test = images(x_test), y_test
        self.model, self.control = None, 0.0


def images(x_uint8):
    return (x_uint8 / 255 - 0.5) / 0.5


def batches_of(order, size):
    """The short last batch is kept; a last batch of one is merged into the one before."""
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


class Adam:
    """Kingma and Ba, Algorithm 1, with L2 weight decay in the gradient."""

    def __init__(self, weight_decay=0.0):
        self.t, self.m, self.v, self.weight_decay = 0, 0.0, 0.0, weight_decay

    def step(self, w, gradient, lr):
        gradient = gradient + self.weight_decay * w
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        return w - lr * (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8)


class Round(NamedTuple):
    """What a round left: the average model, the message; the terms, the report and the local test of each client."""

    weights: np.ndarray
    statistics: np.ndarray
    message: dict[str, np.ndarray]
    losses: list[dict[str, float]]
    reports: list[dict[str, np.ndarray]]
    correct: list[int]


class FedAvg:
    """Cross-entropy alone. The others add terms; all share this rule of training, averaging and testing."""

    halve_every = 2  # rounds; 10 in the paper
    net = Dense()

    def __init__(self, public=None):
        self.public = public  # (A, 3, H, W) in [-1, 1]

    def begin(self, client, model, message, round):
        """Once before a client's round."""

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        """{term: weighted value (...)} beside the cross-entropy; `self` knows client, model and message by `begin`."""
        return {}

    def report(self, client, model):
        """{name: array} from the trained model in eval mode."""
        return {}

    def combine(self, reports, round):
        """{name: array} for the next round."""
        return {}

    def stepped(self, mean_P, received_P):
        """The new global weights."""
        return mean_P

    def terms(self, w, client, index_B):
        feature_BD, logits_BC, self.batch_statistics = self.net.forward(w, client.x[index_B])
        return {
            "cross_entropy": cross_entropy(logits_BC, client.y[index_B]),
            **self.extra(w, client, index_B, feature_BD, logits_BC),
        }

    def train(self, client, model, message, round):
        """(model, mean of each term over the images of the last epoch, report) after local training."""
        self.start_round(client, model, message, round)
        client.model, means = self.descend(client, model, EPOCHS)
        return client.model, means, self.report(client, client.model)

    def start_round(self, client, model, message, round):
        self.begin(client, model, message, round)
        self.shuffle = rng.stream(SEED, "batches", round, client.id)
        self.lr = LR * 0.5 ** ((round - 1) // self.halve_every)

    def descend(self, client, model, epochs, moved_P=1):
        """(model, mean of each term over the images of the last epoch) after these epochs; Adam is new."""
        (w, statistics), adam = model, Adam()
        for _ in range(epochs):
            means = {}
            for index_B in batches_of(self.shuffle.permutation(len(client.y)), BATCH):
                values, gradient = derivative(self.terms, w, client, index_B)
                w = adam.step(w, self.adjusted(client, gradient) * moved_P, self.lr)
                statistics = running_mean(statistics, constant(self.batch_statistics)[0])
                for name, value in values.items():
                    means[name] = means.get(name, 0) + value * len(index_B) / len(client.y)
        return (w, statistics), means

    def adjusted(self, client, gradient):
        """The gradient that Adam gets."""
        return gradient

    def predict(self, model, x):
        """(feature, logits) in eval mode."""
        return self.net.forward(model[0], x, model[1])[:2]

    def rounds(self, clients, model, count):
        """What `count` rounds left, from this (w, statistics) on."""
        left, message = [], {}
        for round in range(1, count + 1):
            received = model[0]
            trained = [self.train(client, model, message, round) for client in clients]
            models, losses, reports = map(list, zip(*trained))
            images = [len(client.y) for client in clients]
            model = tuple(sum(n * part for n, part in zip(images, parts)) / sum(images) for parts in zip(*models))
            model = self.stepped(model[0], received), model[1]
            message = self.combine(reports, round)
            correct = [int((self.predict(c.model, c.x_test)[1].argmax(1) == c.y_test).sum()) for c in clients]
            left.append(Round(*model, message, losses, reports, correct))
        return left


# ---- the schemes


class FedProx(FedAvg):
    """(mu / 2) ||w - w_received||^2."""

    mu = 0.5

    def begin(self, client, model, message, round):
        self.received_P = model[0]

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        return {"proximal": self.mu / 2 * ((w - self.received_P) ** 2).sum(-1)}


class Moon(FedAvg):
    """-mu log( e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}) ), both frozen."""

    mu, tau = 1.0, 0.5

    def begin(self, client, model, message, round):
        self.received, self.previous = model, client.model

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if self.previous is None:  # one logit alone: -log 1
            return {"contrastive": 0.0}
        glob, prev = (
            np.exp(cosine(feature_BD, self.predict(model, client.x[index_B])[0]) / self.tau)
            for model in (self.received, self.previous)
        )
        return {"contrastive": -self.mu * np.log(glob / (glob + prev)).mean(-1)}


class FedAlign(FedAvg):
    """mu stopgrad(CE / A) A, A = mean (s_student - s_teacher)^2; student: a quarter of the last stage's channels."""

    mu, width, net = 0.45, 0.25, Convolutional()

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        in_BHWI, out_BHWO, _ = self.net.maps(constant(w)[0], client.x[index_B])
        slim_BHWI = in_BHWI[..., : int(in_BHWI.shape[-1] * self.width)]
        student_BHWO, _ = self.net.last_stage(w, slim_BHWI, int(out_BHWO.shape[-1] * self.width))
        gap = singular_value(slim_BHWI, student_BHWO) - singular_value(in_BHWI, out_BHWO)
        lipschitz = (gap**2).mean(-1)
        return {"alignment": self.mu * constant(cross_entropy(logits_BC, client.y[index_B]) / lipschitz) * lipschitz}


def singular_value(in_BHWI, out_BHWO):
    """(..., B): of FSP = F_in F_out^T / (H W), by 10 power iterations on FSP FSP^T from the all-ones vector."""
    height, width = out_BHWO.shape[-3:-1]
    in_BIX = pooled(in_BHWI.transpose(0, 3, 1, 2), height).reshape(len(in_BHWI), -1, height * width)
    out_BXO = out_BHWO.reshape(*out_BHWO.shape[:-3], height * width, -1)
    matrix = in_BIX @ out_BXO / (height * width)
    square = matrix @ matrix.swapaxes(-1, -2)
    vector = np.ones((*square.shape[:-1], 1))
    for _ in range(10):
        image = square @ vector
        length = norm(image[..., 0])
        vector = image / length[..., None, None]
    return np.sqrt(length)


class FedProto(FedAvg):
    """lam (1 / (B D)) sum ||R(x_k) - P^{y_k}||^2; a class that nobody holds adds 0."""

    lam, latent = 0.05, LATENT

    def begin(self, client, model, message, round):
        self.message, self.now = message, round

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if not self.message:
            return {"prototype": 0.0}
        y_B = client.y[index_B]
        known_B = self.message["count_C"][y_B] > 0
        square_B = ((feature_BD - self.message["feature_CD"][y_B]) ** 2).sum(-1)
        return {"prototype": self.lam * (square_B * known_B).sum(-1) / (len(y_B) * self.latent)}

    def report(self, client, model):
        feature_ND, _ = self.predict(model, client.x)
        return {"count_C": counts(client.y), "feature_CD": means_by_class(feature_ND, client.y)}

    def combine(self, reports, round):
        return mean_of_sharers(reports)


def counts(y_N):
    return np.array([(y_N == j).sum() for j in range(CLASSES)])


def means_by_class(value_NX, y_N):
    return np.array([value_NX[y_N == j].mean(0) if (y_N == j).any() else 0 * value_NX[0] for j in range(CLASSES)])


def mean_of_sharers(reports):
    """Per class sum_i p_i value_i with p_i = N_i^j / sum over those who share it; zeros where nobody does."""
    total_C = sum(report["count_C"] for report in reports)
    message = {"count_C": total_C}
    for name in reports[0]:
        if name != "count_C":
            message[name] = np.array(
                [sum(r["count_C"][j] * r[name][j] for r in reports) / max(total_C[j], 1) for j in range(CLASSES)]
            )
    return message


class FedHKD(FedProto):
    """lam mean_j ||Q(G(H^j), T) - Q^j|| + gamma (1 / B) sum ||R(x_k) - H^{y_k}||, norms not squared."""

    lam = gamma = 0.05
    temperature, nu, zeta, sigma = 0.5, 0.25, 3.0, 7.0

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if not self.message:
            return {"soft": 0.0, "feature": 0.0}
        y_B, known_C = client.y[index_B], self.message["count_C"] > 0
        soft_KC = softmax(self.net.classify(w, self.message["feature_CD"][known_C]) / self.temperature)
        soft = norm(soft_KC - self.message["soft_CC"][known_C]).mean(-1)
        feature = (norm(feature_BD - self.message["feature_CD"][y_B]) * known_C[y_B]).mean(-1)
        return {"soft": self.lam * soft, "feature": self.gamma * feature}

    def report(self, client, model):
        feature_ND, logits_NC = self.predict(model, client.x)
        count_C = counts(client.y)
        std_C = 2 * self.zeta * self.sigma / np.maximum(count_C, 1)
        unit_CD = rng.stream(SEED, "noise", self.now, client.id).standard_normal((CLASSES, self.latent))
        shared_C = (count_C > 0) & (count_C / len(client.y) >= self.nu)
        noisy_CD = means_by_class(feature_ND, client.y) + std_C[:, None] * unit_CD
        soft_CC = means_by_class(softmax(logits_NC / self.temperature), client.y)
        return {
            "count_C": count_C * shared_C,
            "feature_CD": noisy_CD * shared_C[:, None],
            "soft_CC": soft_CC * shared_C[:, None],
        }


class FedHKDStar(FedHKD):
    """gamma = 0."""

    gamma = 0.0


class FedMD(FedAvg):
    """lam KL(teacher || Q(z, T)) on a batch of public images; the teacher: the plain mean of the clients' Q(z, T)."""

    lam, temperature = 0.05, 0.5

    def begin(self, client, model, message, round):
        self.message, self.order = message, []
        self.stream = rng.stream(SEED, "public batches", round, client.id)

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if not self.message:
            return {"distillation": 0.0}
        if len(self.order) < len(index_B):  # each public image once before any twice
            self.order += self.stream.permutation(len(self.public)).tolist()
        public_B, self.order = self.order[: len(index_B)], self.order[len(index_B) :]
        _, z_BC, _ = self.net.forward(w, self.public[public_B])  # train mode, but its statistics are not kept
        teacher_BC = self.message["soft_AC"][public_B]
        divergence_B = (teacher_BC * (np.log(teacher_BC) - log_softmax(z_BC / self.temperature))).sum(-1)
        return {"distillation": self.lam * divergence_B.mean(-1)}

    def report(self, client, model):
        return {"soft_AC": softmax(self.predict(model, self.public)[1] / self.temperature)}

    def combine(self, reports, round):
        return {"soft_AC": sum(report["soft_AC"] for report in reports) / len(reports)}


class FedGen(FedAvg):
    """alpha (generated / BATCH) CE(h(G(y')), y') + beta KL(stopgrad softmax(h(G(y))) || softmax(z)), times .98 a round.

    The server trains G: mean sum_i w_i(y) CE(h_i(G(y)), y) + exp(-mean pairs (noise distance * latent distance)), Adam
    with weight decay, whose state goes on from round to round.
    """

    alpha = beta = 10.0
    decay, generator_lr, weight_decay = 0.98, 3e-4, 0.01
    noise, hidden, generated, steps = 3, 6, 5, 4  # small; 64, 512, 32 and 50 in the paper
    shapes = {
        "weight1": (hidden, noise + CLASSES),
        "bias1": (hidden,),
        "scale": (hidden,),
        "shift": (hidden,),
        "weight2": (LATENT, hidden),
        "bias2": (LATENT,),
    }

    def __init__(self, public=None):
        self.first = rng.stream(SEED, "generator", 1)
        start = {name: self.first.uniform(-1, 1, shape) for name, shape in self.shapes.items()}
        for name, inputs in (
            ("weight1", self.noise + CLASSES),
            ("bias1", self.noise + CLASSES),
            ("weight2", self.hidden),
            ("bias2", self.hidden),
        ):
            start[name] /= np.sqrt(inputs)  # torch's initial Linear: uniform within 1 / sqrt(inputs)
        start |= {"scale": np.ones(self.hidden), "shift": np.zeros(self.hidden)}
        self.generator_P, self.adam = join(start, self.shapes), Adam(self.weight_decay)
        self.mean, self.variance = np.zeros(self.hidden), np.ones(self.hidden)

    # the generator

    def generate(self, generator_P, noise_BN, y_B, running=None):
        """(latent vectors (..., B, D), statistics of this batch)."""
        part = split(generator_P, self.shapes)
        x = linear(np.concatenate([noise_BN, np.eye(CLASSES)[y_B]], 1), part["weight1"], part["bias1"])
        x, batch = batch_norm(x, part["scale"], part["shift"], running)
        return linear(relu(x), part["weight2"], part["bias2"]), batch

    def draw_noise(self, stream, count):
        return stream.random((count, self.noise), "float32").astype(float)

    def combine(self, reports, round):
        stream = self.first if round == 1 else rng.stream(SEED, "generator", round)
        count_C = sum(report["count_C"] for report in reports)
        lr = self.generator_lr * self.decay ** (round - 1)
        for _ in range(self.steps):
            y_B = stream.choice(np.flatnonzero(count_C), self.generated)
            noise_BN = self.draw_noise(stream, self.generated)
            _, gradient = derivative(self.generator_terms, self.generator_P, noise_BN, y_B, reports, count_C)
            self.generator_P = self.adam.step(self.generator_P, gradient, lr)
            mean, variance = (constant(each)[0] for each in self.generator_statistics)
            self.mean, self.variance = running_mean(self.mean, mean), running_mean(self.variance, variance)
        parts = split(self.generator_P, self.shapes)
        return {"count_C": count_C, "mean": self.mean, "variance": self.variance, **parts}

    def generator_terms(self, p, noise_BN, y_B, reports, count_C):
        latent_BD, self.generator_statistics = self.generate(p, noise_BN, y_B)
        teacher, rows = 0, np.arange(len(y_B))
        for report in reports:
            log_B = log_softmax(linear(latent_BD, report["head_CD"], report["head_bias_C"]))[..., rows, y_B]
            teacher = teacher - (report["count_C"][y_B] / count_C[y_B] * log_B).mean(-1)
        difference = latent_BD[..., :, None, :] - latent_BD[..., None, :, :]
        latent_BB = (difference * np.sign(constant(difference))).mean(-1)
        noise_BB = ((noise_BN[:, None] - noise_BN[None]) ** 2).mean(-1)
        return {"teacher": teacher, "diversity": np.exp(-(noise_BB * latent_BB).mean((-1, -2)))}

    # the clients

    def begin(self, client, model, message, round):
        self.message, self.factor = message, self.decay ** (round - 1)
        self.draws = rng.stream(SEED, "generated vectors", round, client.id)

    def latent_for(self, y_B):
        noise_BN = self.draw_noise(self.draws, len(y_B))
        running = self.message["mean"], self.message["variance"]
        return self.generate(join(self.message, self.shapes), noise_BN, y_B, running)[0]

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if not self.message:
            return {"generated": 0.0, "divergence": 0.0}
        drawn = self.draws.choice(np.flatnonzero(self.message["count_C"]), self.generated)
        generated = cross_entropy(self.net.classify(w, self.latent_for(drawn)), drawn)
        target_BC = constant(softmax(self.net.classify(w, self.latent_for(client.y[index_B]))))
        divergence = (target_BC * (np.log(target_BC) - log_softmax(logits_BC))).sum(-1).mean(-1)
        return {
            "generated": self.alpha * self.factor * self.generated / BATCH * generated,
            "divergence": self.beta * self.factor * divergence,
        }

    def report(self, client, model):
        part = split(model[0], self.net.shapes)
        head_CD, bias_C = part["classifier.weight"], part["classifier.bias"]
        return {"count_C": counts(client.y), "head_CD": head_CD, "head_bias_C": bias_C}


class FedNTD(FedAvg):
    """beta sum_{c != y} q_g(c) log(q_g(c) / q_l(c)), both over the other classes alone; g: the received model."""

    beta, tau = 1.0, 1.0

    def begin(self, client, model, message, round):
        self.received = model

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        own, received = 0.0, self.predict(self.received, client.x[index_B])[1]
        for place, label in enumerate(client.y[index_B]):
            others = [c for c in range(CLASSES) if c != label]
            log_q, log_p = (log_softmax(z[..., place, others] / self.tau) for z in (logits_BC, received))
            own = own + (np.exp(log_p) * (log_p - log_q)).sum(-1)
        return {"not_true": self.beta * own / len(index_B)}


def places(shapes: dict, *names):
    """(P,) bool: where these tensors lie."""
    return np.concatenate([np.full(int(np.prod(shape)), name in names) for name, shape in shapes.items()])


class FedBN(FedAvg):
    """Scale, shift and running statistics of BatchNorm stay with the client."""

    own_P = places(Dense.shapes, "extractor.3.weight", "extractor.3.bias")

    def train(self, client, model, message, round):
        if client.model:
            model = np.where(self.own_P, client.model[0], model[0]), client.model[1]
        return super().train(client, model, message, round)


class FedRep(FedAvg):
    """The head stays with the client; it is trained first, then the rest."""

    head_epochs = 2  # 10 in the paper
    head_P = places(Dense.shapes, "classifier.weight", "classifier.bias")

    def train(self, client, model, message, round):
        if client.model:
            model = np.where(self.head_P, client.model[0], model[0]), model[1]
        self.start_round(client, model, message, round)
        model, _ = self.descend(client, model, self.head_epochs, self.head_P)
        client.model, means = self.descend(client, model, EPOCHS, ~self.head_P)
        return client.model, means, {}


class Ditto(FedAvg):
    """Beside the global model, a personal one v: F(v) + (lam / 2) ||v - w_received||^2."""

    lam = 1.0

    def train(self, client, model, message, round):
        self.start_round(client, model, message, round)
        self.centre_P = None
        trained, _ = self.descend(client, model, EPOCHS)
        self.centre_P = model[0]
        client.model, means = self.descend(client, client.model or model, EPOCHS)
        return trained, means, {}

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        if self.centre_P is None:
            return {"proximal": 0.0}
        return {"proximal": self.lam / 2 * ((w - self.centre_P) ** 2).sum(-1)}


class Scaffold(FedAvg):
    """g - c_i + c; c_i: the mean of the gradients of the client's last round, c: the mean of all clients' c_i."""

    server_control = 0.0

    def begin(self, client, model, message, round):
        self.seen, self.correction_P = [], message.get("control_P", 0.0) - client.control

    def adjusted(self, client, gradient):
        self.seen.append(gradient)
        return gradient + self.correction_P

    def report(self, client, model):
        before, client.control = client.control, sum(self.seen) / len(self.seen)
        return {"control_P": client.control - before}

    def combine(self, reports, round):
        self.server_control = self.server_control + sum(report["control_P"] for report in reports) / len(reports)
        return {"control_P": self.server_control}


class FedDyn(FedAvg):
    """L - <g, w> + (alpha / 2) ||w - w_received||^2, g <- g - alpha (w_k - w_received); w <- mean - h / alpha, h <- h -
    alpha sum_k p_k (w_k - w_received)."""

    alpha, h = 0.01, 0.0

    def begin(self, client, model, message, round):
        self.received_P = model[0]

    def extra(self, w, client, index_B, feature_BD, logits_BC):
        linear = (client.control * w).sum(-1) if np.ndim(client.control) else 0.0
        away = ((w - self.received_P) ** 2).sum(-1)
        return {"dynamic": self.alpha / 2 * away - linear + self.constant_of(client)}

    def constant_of(self, client):
        """So that the value is that of the completed square."""
        moved_P = client.control / self.alpha
        return (client.control * self.received_P).sum() + self.alpha / 2 * np.sum(moved_P**2)

    def report(self, client, model):
        client.control = client.control - self.alpha * (model[0] - self.received_P)
        return {}

    def stepped(self, mean_P, received_P):
        self.h = self.h - self.alpha * (mean_P - received_P)
        return mean_P - self.h / self.alpha


SCHEMES = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "moon": Moon,
    "fedalign": FedAlign,
    "fedgen": FedGen,
    "fedmd": FedMD,
    "fedproto": FedProto,
    "fedhkd": FedHKD,
    "fedhkd_star": FedHKDStar,
    "fedntd": FedNTD,
    "fedbn": FedBN,
    "fedrep": FedRep,
    "ditto": Ditto,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
}
