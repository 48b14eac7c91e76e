#!/usr/bin/env bash
# The tests need some packages of the system. With root and apt-get this script installs those that
# are missing. Otherwise it says which tests will be skipped. It never fails.
set -u

wanted=()
tests=()
[ -e /usr/include/gtest/gtest.h ] || { wanted+=(libgtest-dev); tests+=("C++ tests"); }
command -v chromedriver >/dev/null ||
  { wanted+=(chromium chromium-driver); tests+=("tests of the timeline page"); }
command -v ip >/dev/null || { wanted+=(iproute2); tests+=("tests of several hosts"); }
[ ${#wanted[@]} = 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${wanted[*]} ..."
  (apt-get update && apt-get install -y --no-install-recommends "${wanted[@]}") >/dev/null 2>&1 &&
    exit 0
fi
joined=$(printf ' and the %s' "${tests[@]}")
echo "the${joined# and the} will be skipped: they need the packages ${wanted[*]}"
