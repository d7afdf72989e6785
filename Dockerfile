# docker build -t dml . && docker run --rm -v "$PWD/runs:/dml/runs" dml
# On a CPU. With options of another run: docker run ... dml make run ARGS="method=gsp paths.output_dir=runs/gsp"
FROM python:3.12-slim
# g++ is for trainer.compile, git for the commit in provenance.json
RUN apt-get update && apt-get install --yes --no-install-recommends make git g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /dml
COPY . .
RUN make install
CMD ["make", "run"]
