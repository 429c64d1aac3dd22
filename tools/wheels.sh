# Fills wheels/ with all that the image installs. Runs inside the image's base (`make wheels`): what
# is needed depends on Python's version, down to the patch.
set -e
python3 -m venv /tmp/venv
/tmp/venv/bin/python -c "
import tomllib
described = tomllib.load(open('pyproject.toml', 'rb'))
project = described['project']
needed = project['dependencies'], project['optional-dependencies']['s3'], described['build-system']['requires']
print(*(name for names in needed for name in names), sep='\n')" > /tmp/needed.txt
PIP_CONSTRAINT=constraints.txt /tmp/venv/bin/pip download --quiet --dest wheels --requirement /tmp/needed.txt
