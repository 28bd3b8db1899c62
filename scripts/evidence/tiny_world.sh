# What evidence about runs of the tiny world begins with: sourced by its scripts, which then stand in the repository's root.
cd "$(dirname "$0")/../.."
source scripts/install.sh cpu
python scripts/evidence/stamp.py --clean
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
[ -d tiny-world ] || python scripts/make_tiny_world.py --out tiny-world --seed 0
