-- swap.lua: write each record if the version its caller saw still stands.
-- KEYS[n] record   ARGV[3n-2] expected version, 8 bytes (empty: absent)
--                  ARGV[3n-1] new value (empty: delete)   ARGV[3n] when to forget it, in ms
-- returns the losers only, as pairs: n, and the value that stands (empty: none does)

local call, lost = redis.call, {}
for n, key in ipairs(KEYS) do
  local expected, value, standing = ARGV[3 * n - 2], ARGV[3 * n - 1], false
  if expected == '' then
    standing = call('GET', key)
  -- The version is bytes 1 to 8 of a value, so that nothing has to be decoded here.
  elseif call('GETRANGE', key, 1, 8) ~= expected then
    standing = call('GET', key) or ''
  end
  if standing then
    lost[#lost + 1] = n
    lost[#lost + 1] = standing
  elseif value == '' then
    call('DEL', key)
  else
    call('SET', key, value, 'PXAT', ARGV[3 * n])
  end
end
return lost
