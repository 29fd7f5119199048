-- swap.lua: write each record if the version its caller saw still stands.
-- KEYS[n] record   ARGV[3n-2] expected version, 8 bytes (empty: absent)
--                  ARGV[3n-1] new value (empty: delete)   ARGV[3n] when to forget it, in ms
-- returns nothing where all have won; else for each n the value that stands (empty: none does),
-- or false where it has won

local call, keys, args, answers, has_lost = redis.call, KEYS, ARGV, {}, false
for n = 1, #keys do
  local key, expected, value, standing = keys[n], args[3 * n - 2], args[3 * n - 1], false
  if expected == '' then
    standing = call('GET', key)
  -- The version is bytes 1 to 8 of a value, so that nothing has to be decoded here.
  elseif call('GETRANGE', key, '1', '8') ~= expected then
    standing = call('GET', key) or ''
  end
  answers[n] = standing
  if standing then
    has_lost = true
  elseif value == '' then
    call('DEL', key)
  else
    call('SET', key, value, 'PXAT', args[3 * n])
  end
end
return has_lost and answers or {}
