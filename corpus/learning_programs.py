"""Reinforcement learning, games and evolution: RLax, gymnax, pgx, Jumanji, mctx, flashbax, evosax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


def _mlp(*widths: int, seed: int = 0) -> Any:
    def make() -> list[dict[str, jax.Array]]:
        keys = jax.random.split(jax.random.key(seed), len(widths))
        return [
            {"w": jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}
            for k, a, b in zip(keys, widths, widths[1:], strict=False)
        ]

    return make


def _apply(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


@program(
    "rlax",
    "train",
    "fit",
    small=dict(batch=16, length=16, width=32, hidden=64, actions=6),
    full=dict(batch=4096, length=64, width=512, hidden=4096, actions=18),
)
def rlax_vtrace(batch: int, length: int, width: int, hidden: int, actions: int) -> Case:
    """An actor-critic loss of RLax (V-trace, entropy) under vmap, Adam."""
    import rlax

    def loss(params: Any, observation: jax.Array, action: jax.Array, reward: jax.Array) -> jax.Array:
        logits, values = _apply(params["policy"], observation), _apply(params["value"], observation)[..., 0]

        def one(logits: jax.Array, values: jax.Array, action: jax.Array, reward: jax.Array) -> jax.Array:
            ratios = jnp.exp(jax.nn.log_softmax(logits)[jnp.arange(length), action] + jnp.log(actions))[:-1]
            out = rlax.vtrace_td_error_and_advantage(
                values[:-1], values[1:], reward[:-1], 0.99 * jnp.ones(length - 1), jax.lax.stop_gradient(ratios), 0.95
            )
            weights = jnp.ones(length - 1)
            policy = rlax.policy_gradient_loss(logits[:-1], action[:-1], out.pg_advantage, weights)
            return policy + 0.5 * jnp.mean(out.errors**2) + 0.01 * rlax.entropy_loss(logits[:-1], weights)

        return jnp.mean(jax.vmap(one)(logits, values, action, reward))

    def params() -> Any:
        return {"policy": _mlp(width, hidden, hidden, actions)(), "value": _mlp(width, hidden, 1, seed=1)()}

    batches = normal(batch, length, width), tokens(batch, length, below=actions), normal(batch, length, seed=3)
    return training(loss, optax.adam(1e-3), params, *batches)


@program(
    "rlax",
    "train",
    "test",
    small=dict(batch=32, width=32, hidden=64, actions=6, atoms=51),
    full=dict(batch=32768, width=512, hidden=4096, actions=18, atoms=51),
)
def rlax_categorical(batch: int, width: int, hidden: int, actions: int, atoms: int) -> Case:
    """Categorical Q-learning of RLax under vmap, with a target network; Adam."""
    import rlax

    support = jnp.linspace(-10.0, 10.0, atoms)

    def loss(params: Any, target: Any, first: jax.Array, action: jax.Array, reward: jax.Array, last: jax.Array) -> Any:
        now = _apply(params, first).reshape(batch, actions, atoms)
        then = _apply(target, last).reshape(batch, actions, atoms)
        means = jnp.sum(jax.nn.softmax(then) * support, -1)
        error = jax.vmap(rlax.categorical_double_q_learning, in_axes=(None, 0, 0, 0, 0, None, 0, 0))
        return jnp.mean(error(support, now, action, reward, 0.99 * jnp.ones(batch), support, then, means))

    params = _mlp(width, hidden, hidden, actions * atoms)
    data = normal(batch, width), tokens(batch, below=actions), normal(batch, seed=3), normal(batch, width, seed=4)
    return training(loss, optax.adam(1e-3), params, params, *data)


@program("gymnax", "infer", "fit", small=dict(batch=32, steps=8), full=dict(batch=262144, steps=64))
def gymnax_rollout(batch: int, steps: int) -> Case:
    """A rollout of gymnax's CartPole with a policy network: a scan over steps of vmapped environments."""
    import gymnax

    env, env_params = gymnax.make("CartPole-v1")

    def rollout(params: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset, run = jax.random.split(key)
        observation, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(reset, batch), env_params)

        def step(carry: Any, key: jax.Array) -> Any:
            observation, state = carry
            action = jnp.argmax(_apply(params, observation), -1)
            keys = jax.random.split(key, batch)
            observation, state, reward, *_ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                keys, state, action, env_params
            )
            return (observation, state), reward

        (observation, _), rewards = jax.lax.scan(step, (observation, state), jax.random.split(run, steps))
        return observation, rewards.sum(0)

    return Case(rollout, lambda: (_mlp(4, 64, 2)(), jax.random.key(1)))


@program("pgx", "infer", "fit", small=dict(batch=16, steps=4), full=dict(batch=16384, steps=32))
def pgx_connect_four(batch: int, steps: int) -> Case:
    """Games of Connect Four of pgx, played at random: a scan over vmapped steps."""
    import pgx

    env = pgx.make("connect_four")

    def play(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jax.vmap(env.init)(jax.random.split(key, batch))

        def step(state: Any, key: jax.Array) -> Any:
            logits = jnp.where(state.legal_action_mask, 0.0, -1e9)
            action = jax.random.categorical(key, logits, axis=-1)
            return jax.vmap(env.step)(state, action), None

        state, _ = jax.lax.scan(step, state, jax.random.split(key, steps))
        return state.observation, state.rewards

    return Case(play, lambda: (jax.random.key(0),))


@program("jumanji", "infer", "test", small=dict(batch=16, steps=4), full=dict(batch=16384, steps=32))
def jumanji_game_2048(batch: int, steps: int) -> Case:
    """The game 2048 of Jumanji: a scan over steps of vmapped environments."""
    import jumanji

    env = jumanji.make("Game2048-v1")

    def play(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, timestep = jax.vmap(env.reset)(jax.random.split(key, batch))

        def step(carry: Any, key: jax.Array) -> Any:
            state, timestep = carry
            logits = jnp.where(timestep.observation.action_mask, 0.0, -1e9)
            state, timestep = jax.vmap(env.step)(state, jax.random.categorical(key, logits))
            return (state, timestep), timestep.reward

        (state, _), rewards = jax.lax.scan(step, (state, timestep), jax.random.split(key, steps))
        return state.board, rewards

    return Case(play, lambda: (jax.random.key(0),))


@program("flashbax", "infer", "test", small=dict(batch=16, length=64), full=dict(batch=4096, length=1024))
def flashbax_replay(batch: int, length: int) -> Case:
    """A trajectory buffer of flashbax: add a step of all environments, sample a batch of sequences."""
    import flashbax

    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=batch,
        sample_batch_size=batch,
        sample_sequence_length=8,
        period=1,
        min_length_time_axis=8,
        max_length_time_axis=length,
    )

    def step(state: Any, observation: jax.Array, reward: jax.Array, key: jax.Array) -> Any:
        state = buffer.add(state, {"observation": observation, "reward": reward})
        return state, buffer.sample(state, key).experience

    def make() -> tuple[Any, ...]:
        state = buffer.init({"observation": jnp.zeros(64), "reward": jnp.zeros(())})
        return state, normal(batch, 8, 64)(), normal(batch, 8, seed=4)(), jax.random.key(3)

    return Case(step, make, donate=(0,))


@program("evosax", "train", "fit", small=dict(population=32, width=64), full=dict(population=8192, width=4096))
def evosax_open_es(population: int, width: int) -> Case:
    """A generation of OpenAI's evolution strategy of evosax: ask, evaluate a network, tell."""
    from evosax.algorithms import Open_ES

    solution = jax.eval_shape(_mlp(16, width, 4))
    algorithm = Open_ES(population, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), solution))
    params = algorithm.default_params

    def generation(state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        ask, tell = jax.random.split(key)
        candidates, state = algorithm.ask(ask, state, params)
        fitness = jax.vmap(lambda p: jnp.mean((_apply(p, x) - y) ** 2))(candidates)
        state, _ = algorithm.tell(tell, candidates, fitness, state, params)
        return state, fitness.min()

    def make() -> tuple[Any, ...]:
        state = algorithm.init(jax.random.key(0), _mlp(16, width, 4)(), params)
        return state, jax.random.key(1), normal(64, 16)(), normal(64, 4, seed=4)()

    return Case(generation, make, donate=(0,))


@program("evosax", "train", "test", small=dict(population=64, width=32), full=dict(population=16384, width=1024))
def evosax_pso(population: int, width: int) -> Case:
    """A step of particle swarm optimization of evosax on Rastrigin's function."""
    from evosax.algorithms import PSO

    algorithm = PSO(population, jnp.zeros(width))
    params = algorithm.default_params

    def evaluate(x: jax.Array) -> jax.Array:
        return jnp.sum(x**2 - 10 * jnp.cos(2 * jnp.pi * x) + 10, -1)

    def step(state: Any, key: jax.Array) -> Any:
        ask, tell = jax.random.split(key)
        candidates, state = algorithm.ask(ask, state, params)
        state, _ = algorithm.tell(tell, candidates, evaluate(candidates), state, params)
        return state, evaluate(candidates).min()

    def make() -> tuple[Any, ...]:
        start = normal(population, width)()
        return algorithm.init(jax.random.key(0), start, evaluate(start), params), jax.random.key(1)

    return Case(step, make, donate=(0,))


@program(
    "mctx",
    "infer",
    "fit",
    small=dict(batch=16, width=64, simulations=8),
    full=dict(batch=4096, width=1024, simulations=32),
)
def mctx_gumbel(batch: int, width: int, simulations: int) -> Case:
    """Gumbel MuZero's batched tree search of mctx with a learned model."""
    import mctx

    def heads(params: Any, state: jax.Array) -> Any:
        return mctx.RecurrentFnOutput(
            reward=_apply(params["reward"], state)[:, 0],
            discount=jnp.ones(batch),
            prior_logits=_apply(params["policy"], state),
            value=_apply(params["value"], state)[:, 0],
        )

    def recurrent(params: Any, key: jax.Array, action: jax.Array, state: jax.Array) -> Any:
        state = _apply(params["model"], jnp.concatenate([state, jax.nn.one_hot(action, 18)], -1))
        return heads(params, state), state

    def search(params: Any, key: jax.Array, observation: jax.Array) -> jax.Array:
        state = _apply(params["encode"], observation)
        out = heads(params, state)
        root = mctx.RootFnOutput(prior_logits=out.prior_logits, value=out.value, embedding=state)
        return mctx.gumbel_muzero_policy(params, key, root, recurrent, num_simulations=simulations).action_weights

    def make() -> tuple[Any, ...]:
        params = {
            "encode": _mlp(64, width, width)(),
            "model": _mlp(width + 18, width, width, seed=1)(),
            "reward": _mlp(width, 1, seed=2)(),
            "policy": _mlp(width, 18, seed=3)(),
            "value": _mlp(width, 1, seed=4)(),
        }
        return params, jax.random.key(5), normal(batch, 64)()

    return Case(search, make)
