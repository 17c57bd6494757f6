# Everything but the server: import, prepare, train, evaluate, measure. From the repository's root:
#   docker build -f deploy/train.Dockerfile -t darkroom-train .                        CUDA (its libraries come with torch)
#   docker build -f deploy/train.Dockerfile -t darkroom-train --build-arg CPU=1 .      CPU
# The verbs are the container's arguments; recipes are at /recipes, the working folder is /work:
#   docker run --rm -v $PWD:/work darkroom-train import photos/ pictures.lance --kind auto
#   docker run --rm -v $PWD:/work --gpus all darkroom-train prepare pictures.lance --model sd2/ --resolution 256 --text
#   docker run --rm -v $PWD:/work --gpus all --ipc host --stop-timeout 300 darkroom-train train /recipes/sd2-base-256.yaml data.store=pictures.lance model.base=sd2/ --out runs/sd2 --resume auto
#   docker run --rm -v $PWD:/work darkroom-train train /recipes/sd2-base-256.yaml data.store=pictures.lance --plan
#   docker run --rm -v $PWD:/work darkroom-train runs --root runs
#   docker run --rm -v $PWD:/work darkroom-train export runs/sd2 --to model/ --checkpoint 5000 --ema
#   docker run --rm -v $PWD:/work --gpus all darkroom-train bench train --model sd2 --resolution 512 --batch auto --out results.csv
# --stop-timeout: `docker stop` sends SIGTERM, and the job saves before it ends.
FROM python:3.11-slim

ARG CPU=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements.lock make.py ./
# Every file by its locked hash; then torch, whose build is chosen here.
RUN python make.py locked track s3 ray gpu quant optim > locked.txt \
 && pip install --require-hashes --no-deps -r locked.txt
RUN version=$(sed -n 's/^torch==//p' requirements.lock) \
 && if [ -n "$CPU" ]; then pip install --index-url https://download.pytorch.org/whl/cpu "torch==$version"; \
    else pip install "torch==$version"; fi
COPY src ./src
RUN pip install --no-deps --no-build-isolation . && pip check && rm -rf /src/*
COPY recipes /recipes

RUN useradd --uid 1000 --create-home darkroom && mkdir /work && chown darkroom /work
USER darkroom
WORKDIR /work
# The form with brackets: the job itself gets SIGTERM, and saves.
ENTRYPOINT ["darkroom"]
CMD ["--help"]
